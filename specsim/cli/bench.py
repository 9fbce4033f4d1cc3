"""specsim bench: time the fast implementation on a GPU, or the simulator."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.cli.file_options import reads
from specsim.cli.options import option
from specsim.cli.ranks import MOST_RANKS, RankTimeout, start_ranks
from specsim.core.errors import require_int

if TYPE_CHECKING:
    from specsim.bench.suites import Options


def bench(
    suite: Annotated[
        str,
        option(
            "Benchmark",
            "What is timed: kernels, experts, round, persistent, scale, baselines, adaptive, serving, simulator, "
            "tensor-parallel.",
            metavar="NAME",
        ),
    ],
    shape: Annotated[
        str,
        option(
            "Model", "Shape of the model, whose weights are random.", metavar="NAME|config.json|folder", callback=reads
        ),
    ] = "llama-3-8b",
    only: Annotated[
        str, option("Benchmark", "Time only groups whose name contains this text.", show_default="all groups")
    ] = "",
    quick: Annotated[bool, option("Benchmark", "Time a few points of each group.", "--quick")] = False,
    full: Annotated[
        bool, option("Benchmark", "Time all settings of scale, and batches in persistent.", "--full")
    ] = False,
    seconds: Annotated[
        float | None,
        option(
            "Benchmark", "Start no further row after this many seconds. [above 0]", show_default="60 to 400, by suite"
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None,
        option(
            "Ranks",
            "GPUs that share the model in the suite tensor-parallel, one process each. [1 to 64]",
            show_default="2 with that suite, else 1",
        ),
    ] = None,
    rank_timeout: RankTimeout = 300.0,
    json_file: options.JsonFile = None,
) -> None:
    """Time kernels and rounds on a GPU, after equality checks.

    Only the suite simulator needs no GPU: it times the event loop on one core. The suite tensor-parallel needs two.

    Exit status: 0 if all equality checks pass, 1 if one fails, 2 for bad input or without a GPU, 3 if a rank fails.

    Examples:
      specsim bench --suite kernels --quick
      specsim bench --suite round --shape llama-3-8b --json round.json
      specsim bench --suite simulator
    """
    arguments = locals()
    size = arguments["tensor_parallel"] = _size(suite, tensor_parallel)
    if size == 1:
        _bench(**arguments)
    else:
        _check(arguments)
        start_ranks(_bench, arguments, size, rank_timeout, None)


def _size(suite: str, tensor_parallel: int | None) -> int:
    """Choose the number of ranks, two where a suite needs some and none is given."""
    from specsim.bench.suites import SUITES

    if tensor_parallel is not None:
        return require_int("tensor_parallel", tensor_parallel, 1, MOST_RANKS)
    return 2 if suite in SUITES and SUITES[suite].needs_ranks else 1


def _check(arguments: dict[str, Any]) -> "Options":
    """Check the options."""
    from specsim.bench.session import check_options
    from specsim.bench.suites import Options

    suite_options = Options(
        **{name: value for name, value in arguments.items() if name not in ("json_file", "rank_timeout")}
    )
    check_options(suite_options)
    return suite_options


def _bench(**arguments: Any) -> None:
    from specsim.bench.session import bench as run_suite
    from specsim.bench.session import show
    from specsim.core.display import stdout_console

    suite_options = _check(arguments)
    console = stdout_console()
    size = arguments["tensor_parallel"]
    line = options.command(
        bench, arguments | {"tensor_parallel": None if size == _size(arguments["suite"], None) else size}
    )
    result = run_suite(suite_options, line, arguments["json_file"], console)
    show(result, console)
    if not result.passed:
        raise typer.Exit(1)
