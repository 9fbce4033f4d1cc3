"""specsim soak: serve random programs of requests, and compare each request with its solo run."""

from typing import Annotated

import typer

from specsim.cli import options
from specsim.core.errors import InputError


def soak(
    requests: Annotated[int | None, typer.Option(help="Number of requests.", show_default="10000")] = None,
    seed: Annotated[int | None, typer.Option(help="Names the programs.", show_default="0")] = None,
    impl: options.Impl = "reference",
    device: options.Device = None,
    graph: Annotated[
        str | None,
        typer.Option(
            help="Graphs that the fast implementation replays.",
            metavar="eager|step|phase|round",
            show_default="another from program to program",
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the programs.")] = 2,
    program: Annotated[str | None, typer.Option(help="Only this one, as a failure names it.")] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Compare random programs of requests with solo runs.

    Exit status 1: not equal.
    """
    from specsim.core.files import check_writable
    from specsim.correctness.soak import soak

    check_writable(json_file)
    drawn = {"num_requests": requests, "seed": seed}
    drawn = {name: value for name, value in drawn.items() if value is not None}
    if program is not None and drawn:
        raise InputError("program", program, "alone, without --requests and --seed, which its name holds")
    arguments = {"impl": impl, "device": device, "graph": graph, "jobs": jobs, "program": program}
    result = soak(**drawn, progress=True, **arguments)
    options.report(result.show, result.to_json(), json_file, result.is_ok)
