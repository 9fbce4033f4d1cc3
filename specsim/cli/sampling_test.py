"""specsim sampling-test: the tokens of running engines against the target's distribution."""

from typing import Annotated

import typer

from specsim.cli import options


def sampling_test(
    verifier: Annotated[
        str | None,
        typer.Option(
            help="target_only, rejection, block, multi_round or gumbel.",
            metavar="NAME",
            show_default="all, and wrong ones",
        ),
    ] = None,
    impl: Annotated[str, typer.Option(help="Which implementation runs.", metavar="reference|fast|both")] = "reference",
    tokens: Annotated[int, typer.Option(help="Per implementation, at least.")] = 200_000,
    device: options.Device = None,
    seed: Annotated[int, typer.Option(help="Of all requests.")] = 0,
    json_file: options.JsonFile = None,
) -> None:
    """Test whole engines against the target's distribution.

    A known distribution, a drafter opposed to it, six samplings, and errors that have to be rejected. Exit status 1:
    rejected.
    """
    given = locals()
    from specsim.core.files import check_writable
    from specsim.correctness.statistics import run_sampling_tests

    check_writable(json_file)
    line = options.command(sampling_test, given)
    result = run_sampling_tests(verifier, impl=impl, tokens=tokens, device=device, seed=seed, progress=True)
    options.report(result.show, {"command": line} | result.to_json(), json_file, not result.failures)
