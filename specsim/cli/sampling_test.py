"""specsim sampling-test: the tokens of running engines against the target's distribution."""

from dataclasses import dataclass
from typing import Annotated, Literal

from specsim.cli.option_fields import command_line, common
from specsim.cli.options import DeviceOptions, JsonOptions, RuleOptions, exclusive, report
from specsim.core.errors import require
from specsim.core.limits import Seed
from specsim.core.verifiers import VERIFIER_KINDS, one_of


@dataclass(frozen=True, kw_only=True)
class SamplingTestOptions(DeviceOptions, RuleOptions, JsonOptions):
    """Options of specsim sampling-test."""

    # Acceptance rule: {names}.
    verifier: Annotated[
        str | None,
        common(
            "Verification",
            names=one_of(kind for kind in VERIFIER_KINDS if kind.is_lossless),
            values="NAME",
            default="all, and wrong ones that must fail",
        ),
    ] = None
    # Implementation that runs.
    impl: Annotated[Literal["reference", "fast", "both"], common("Execution")] = "reference"
    # Least number of tokens per implementation.
    tokens: Annotated[int, common("Sampling", at_least=1)] = 200_000
    # Random seed of all requests.
    seed: Annotated[Seed, common("Sampling")] = 0


def sampling_test(options: SamplingTestOptions) -> None:
    """Test sampled tokens against the target's distribution.

    Whole engines run with a known target distribution, a drafter opposed to it and six sampling settings. Engines with
    known errors run too, and the tests must reject them.

    Exit status: 0 if nothing correct is rejected and every error is, 1 otherwise, 2 for bad input and for too few
    tokens to detect an error.

    Examples:
      specsim sampling-test --tokens 50000
      specsim sampling-test --verifier rejection --impl both
      specsim sampling-test --rule my_rule.py:rule
    """
    from specsim.core.rule import load_rule
    from specsim.correctness.statistics import run_sampling_tests

    if options.rule is not None and options.verifier is not None:
        raise exclusive("verifier", options.verifier, "--rule")
    result = run_sampling_tests(
        options.verifier if options.rule is None else load_rule(options.rule),
        impl=options.impl,
        tokens=options.tokens,
        device=options.device,
        seed=options.seed,
        progress=True,
    )
    value = {"command": command_line("sampling-test", options)} | result.to_json()
    report("sampling-test", result.show, value, options.json, not result.failures)
    require(result.has_power, "tokens", options.tokens, "more: no test of so few tokens would detect an error")
