"""specsim sampling-test: the tokens of running engines against the target's distribution."""

from typing import Annotated

from specsim.cli import options
from specsim.cli.options import option
from specsim.core.errors import require
from specsim.core.verifiers import VERIFIER_KINDS, one_of


def sampling_test(
    verifier: Annotated[
        str | None,
        option(
            "Verification",
            f"Acceptance rule: {one_of(kind for kind in VERIFIER_KINDS if kind.is_lossless)}.",
            metavar="NAME",
            show_default="all, and wrong ones that must fail",
        ),
    ] = None,
    rule: options.Rule = None,
    impl: Annotated[str, option("Execution", "Implementation that runs.", metavar="reference|fast|both")] = "reference",
    tokens: Annotated[int, option("Sampling", "Least number of tokens per implementation. [at least 1]")] = 200_000,
    device: options.Device = None,
    seed: Annotated[int, option("Sampling", "Random seed of all requests. [0 to 2^64 - 1]")] = 0,
    json_file: options.JsonFile = None,
) -> None:
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
    arguments = locals()
    from specsim.core.rule import load_rule
    from specsim.correctness.statistics import run_sampling_tests

    if rule is not None and verifier is not None:
        raise options.exclusive("verifier", verifier, "--rule")
    line = options.command(sampling_test, arguments)
    tested = verifier if rule is None else load_rule(rule)
    result = run_sampling_tests(tested, impl=impl, tokens=tokens, device=device, seed=seed, progress=True)
    options.report("sampling-test", result.show, {"command": line} | result.to_json(), json_file, not result.failures)
    require(result.has_power, "tokens", tokens, "more: no test of so few tokens would detect an error")
