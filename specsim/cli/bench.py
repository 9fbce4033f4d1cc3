"""specsim bench: time the fast implementation on a GPU."""

from typing import Annotated, Any

import typer

from specsim.cli import options


def bench(
    suite: Annotated[str, typer.Option(help="Operations that are timed.", metavar="kernels|round|scale|baselines")],
    shape: Annotated[str, typer.Option(help="Of the model, by name or config.json; weights random.")] = "llama-3-8b",
    only: Annotated[
        str, typer.Option(help="Groups of rows whose name holds this text.", show_default="all of the suite")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few points.")] = False,
    full: Annotated[bool, typer.Option("--full", help="All points of the grid (scale).")] = False,
    seconds: Annotated[
        float | None, typer.Option(help="Begin no further row after these.", show_default="the suite's own limit")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time kernels and rounds on a GPU, after equality checks.

    Exit status 1: a check failed.
    """
    _bench(locals())


def _bench(given: dict[str, Any]) -> None:
    from specsim.bench.session import bench as run_suite
    from specsim.bench.session import check_options
    from specsim.bench.show import show
    from specsim.bench.suites import Options
    from specsim.core.display import stdout_console
    from specsim.core.files import check_writable

    asked = Options(**{name: each for name, each in given.items() if name != "json_file"})
    check_options(asked)
    check_writable(given["json_file"])
    console = stdout_console()
    line = options.command(bench, given)
    result = run_suite(asked, line, given["json_file"], console)
    show(result, console)
    if not result.passed:
        raise typer.Exit(1)
