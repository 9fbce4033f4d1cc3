"""specsim bench: time the fast implementation on a GPU, or the simulator."""

from typing import Annotated, Any

import typer

from specsim.cli import options
from specsim.cli.options import option


def bench(
    suite: Annotated[
        str,
        option(
            "Benchmark",
            "Operations that are timed.",
            metavar="kernels|experts|round|scale|baselines|adaptive|simulator",
        ),
    ],
    shape: Annotated[
        str,
        option("Model", "Shape of the model, whose weights are random.", metavar="NAME|config.json|folder"),
    ] = "llama-3-8b",
    only: Annotated[
        str, option("Benchmark", "Time only groups whose name contains this text.", show_default="all groups")
    ] = "",
    quick: Annotated[bool, option("Benchmark", "Time a few points of each group.", "--quick")] = False,
    full: Annotated[bool, option("Benchmark", "Time all points of the grid of scale.", "--full")] = False,
    seconds: Annotated[
        float | None,
        option(
            "Benchmark", "Start no further row after this many seconds. [above 0]", show_default="60 to 400, by suite"
        ),
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time kernels and rounds on a GPU, after equality checks.

    Only the suite simulator needs no GPU: it times the event loop on one core.

    Exit status: 0 if all equality checks pass, 1 if one fails, 2 for bad input or without a GPU.

    Examples:
      specsim bench --suite kernels --quick
      specsim bench --suite round --shape llama-3-8b --json round.json
      specsim bench --suite simulator
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
