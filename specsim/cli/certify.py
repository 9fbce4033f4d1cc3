"""specsim certify: exact distributions of the verifiers."""

from typing import Annotated

from specsim.cli import options
from specsim.cli.options import option


def certify(
    verifier: Annotated[
        str | None,
        option(
            "Verification",
            "Acceptance rule: greedy, target_only, typical, rejection, block, gumbel or multi_round.",
            metavar="NAME",
            show_default="all, and wrong ones that must fail",
        ),
    ] = None,
    impl: Annotated[str, option("Execution", "Implementation that runs.", metavar="reference|fast|both")] = "reference",
    device: options.Device = None,
    json_file: options.JsonFile = None,
) -> None:
    """Compute the verifiers' exact output distributions.

    On small vocabularies, every draft tree and every region of the uniform random numbers is enumerated, in fractions.

    Exit status: 0 if every distribution is the promised one, 1 if one is not, 2 for bad input.

    Examples:
      specsim certify
      specsim certify --verifier rejection --impl both
    """
    given = locals()
    from specsim.core.files import check_writable
    from specsim.correctness import exact

    check_writable(json_file)
    line = options.command(certify, given)
    result = exact.certify(verifier, impl=impl, device=device, progress=True)
    options.report("certify", result.show, {"command": line} | result.to_json(), json_file, not result.failures)
