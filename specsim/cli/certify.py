"""specsim certify: exact distributions of the verifiers."""

from dataclasses import dataclass
from typing import Annotated, Literal

from specsim.cli.option_fields import changed, command_line, common
from specsim.cli.options import DeviceOptions, JsonOptions, exclusive, report
from specsim.core.errors import InputError
from specsim.core.verifiers import BY_DRAFTS, one_of


@dataclass(frozen=True, kw_only=True)
class CertifyOptions(DeviceOptions, JsonOptions):
    """Options of specsim certify."""

    # Acceptance rule: greedy, {names}.
    verifier: Annotated[
        str | None,
        common("Verification", names=one_of(BY_DRAFTS), values="NAME", default="all, and wrong ones that must fail"),
    ] = None
    # Python module or file with your own acceptance rules, or one of them.
    module: Annotated[str | None, common("Verification", values="FILE.py[:NAME]", default="none", file="reads")] = None
    # Implementation that runs.
    impl: Annotated[Literal["reference", "fast", "both"], common("Execution")] = "reference"


def certify(options: CertifyOptions) -> None:
    """Compute the verifiers' exact output distributions.

    On small vocabularies, every draft tree and every region of the uniform random numbers is enumerated, in fractions.
    A rule of your own is proved, or refuted with a counterexample.

    Exit status: 0 if every distribution is the promised one, 1 if one is not, 2 for bad input and for a rule whose
    distribution cannot be computed exactly.

    Examples:
      specsim certify
      specsim certify --verifier rejection --impl both
      specsim certify --module my_rule.py:rule
    """
    from specsim.correctness import exact

    module = options.module
    if module is None:
        result = exact.certify(options.verifier, impl=options.impl, device=options.device, progress=True)
    else:
        for name, value in changed(options).items():
            if name not in ("module", "json"):
                raise exclusive(name, value, "--module")
        result = exact.certify_rules(exact.load_rules(module), progress=True)
    value = {"command": command_line("certify", options)} | result.to_json()
    report("certify", result.show, value, options.json, not result.failures)
    if result.not_certified:
        allowed = "rules with an exact distribution; specsim sampling-test --rule FILE.py:NAME tests others"
        raise InputError("module", "; ".join(result.not_certified), allowed)
