"""specsim bench: time the fast implementation on a GPU, or the simulator."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import click

from specsim.cli.option_fields import command_line, common
from specsim.cli.options import JsonOptions
from specsim.cli.ranks import MOST_RANKS, RankTimeoutOptions, start_ranks
from specsim.core.limits import PositiveNumber

if TYPE_CHECKING:
    from specsim.bench.suites import Options


@dataclass(frozen=True, kw_only=True)
class BenchOptions(RankTimeoutOptions, JsonOptions):
    """Options of specsim bench."""

    # What is timed: kernels, experts, round, persistent, scale, baselines, adaptive, serving, simulator,
    # tensor-parallel.
    suite: Annotated[str, common("Benchmark", values="NAME")]
    # Shape of the model, whose weights are random.
    shape: Annotated[str, common("Model", values="NAME|config.json|folder", file="reads")] = "llama-3-8b"
    # Time only groups whose name contains this text.
    only: Annotated[str, common("Benchmark", default="all groups")] = ""
    # Time a few points of each group.
    quick: Annotated[bool, common("Benchmark")] = False
    # Time all settings of scale, and batches in persistent.
    full: Annotated[bool, common("Benchmark")] = False
    # Start no further row after this many seconds.
    seconds: Annotated[PositiveNumber | None, common("Benchmark", default="60 to 400, by suite")] = None
    # GPUs that share the model in the suite tensor-parallel, one process each.
    tensor_parallel: Annotated[
        int | None, common("Ranks", at_least=1, at_most=MOST_RANKS, default="2 with that suite, else 1")
    ] = None


def bench(options: BenchOptions) -> None:
    """Time kernels and rounds on a GPU, after equality checks.

    Only the suite simulator needs no GPU: it times the event loop on one core. The suite tensor-parallel needs two.

    Exit status: 0 if all equality checks pass, 1 if one fails, 2 for bad input or without a GPU, 3 if a rank fails.

    Examples:
      specsim bench --suite kernels --quick
      specsim bench --suite round --shape llama-3-8b --json round.json
      specsim bench --suite simulator
    """
    size = options.tensor_parallel or _default_size(options.suite)
    if size == 1:
        _bench(options)
    else:
        _check(options)
        start_ranks(_bench, options, size, None)


def _default_size(suite: str) -> int:
    """Choose the number of ranks, two where a suite needs some."""
    from specsim.bench.suites import SUITES

    return 2 if suite in SUITES and SUITES[suite].needs_ranks else 1


def _check(options: BenchOptions) -> "Options":
    """Check the options."""
    from specsim.bench.session import check_options
    from specsim.bench.suites import Options

    size = options.tensor_parallel or _default_size(options.suite)
    names = ("suite", "shape", "only", "quick", "full", "seconds")
    suite_options = Options(**{name: getattr(options, name) for name in names}, tensor_parallel=size)
    check_options(suite_options)
    return suite_options


def _bench(options: BenchOptions) -> None:
    from specsim.bench.session import bench as run_suite
    from specsim.bench.session import show
    from specsim.core.display import stdout_console

    console = stdout_console()
    if options.tensor_parallel == _default_size(options.suite):
        options = replace(options, tensor_parallel=None)
    result = run_suite(_check(options), command_line("bench", options), options.json, console)
    show(result, console)
    if not result.passed:
        raise click.exceptions.Exit(1)
