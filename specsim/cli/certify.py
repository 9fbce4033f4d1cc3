"""specsim certify: exact distributions of the verifiers."""

from typing import Annotated

from specsim.cli import options
from specsim.cli.file_options import reads
from specsim.cli.options import option
from specsim.core.errors import InputError
from specsim.core.verifiers import BY_DRAFTS, one_of


def certify(
    verifier: Annotated[
        str | None,
        option(
            "Verification",
            f"Acceptance rule: greedy, {one_of(BY_DRAFTS)}.",
            metavar="NAME",
            show_default="all, and wrong ones that must fail",
        ),
    ] = None,
    module: Annotated[
        str | None,
        option(
            "Verification",
            "Python module or file with your own acceptance rules, or one of them.",
            metavar="FILE.py[:NAME]",
            show_default="none",
            callback=reads,
        ),
    ] = None,
    impl: Annotated[str, option("Execution", "Implementation that runs.", metavar="reference|fast|both")] = "reference",
    device: options.Device = None,
    json_file: options.JsonFile = None,
) -> None:
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
    arguments = locals()
    from specsim.correctness import exact

    line = options.command(certify, arguments)
    if module is None:
        result = exact.certify(verifier, impl=impl, device=device, progress=True)
    else:
        for name, value, default in (
            ("verifier", verifier, None),
            ("impl", impl, "reference"),
            ("device", device, None),
        ):
            if value != default:
                raise options.exclusive(name, value, "--module")
        result = exact.certify_rules(exact.load_rules(module), progress=True)
    options.report("certify", result.show, {"command": line} | result.to_json(), json_file, not result.failures)
    if result.not_certified:
        allowed = "rules with an exact distribution; specsim sampling-test --rule FILE.py:NAME tests others"
        raise InputError("module", "; ".join(result.not_certified), allowed)
