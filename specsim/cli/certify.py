"""specsim certify: exact distributions of the verifiers."""

from typing import Annotated

import typer

from specsim.cli import options


def certify(
    verifier: Annotated[
        str | None,
        typer.Option(
            help="greedy, target_only, typical, rejection, block, gumbel or multi_round.",
            metavar="NAME",
            show_default="all, and wrong ones",
        ),
    ] = None,
    impl: Annotated[str, typer.Option(help="Which implementation runs.", metavar="reference|fast|both")] = "reference",
    device: options.Device = None,
    json_file: options.JsonFile = None,
) -> None:
    """Certify verifiers exactly, in fractions.

    Every drafted tree and every region of the uniforms, on small vocabularies. Exit status 1: not as promised.
    """
    given = locals()
    from specsim.core.files import check_writable
    from specsim.correctness import exact

    check_writable(json_file)
    line = options.command(certify, given)
    result = exact.certify(verifier, impl=impl, device=device, progress=True)
    options.report(result.show, {"command": line} | result.to_json(), json_file, not result.failures)
