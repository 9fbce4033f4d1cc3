"""Runs of suites: rows as they come, and the result of all of them."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from specsim.bench import clock
from specsim.bench.result import Result
from specsim.bench.roofline import UNMEASURED, Peaks
from specsim.bench.row import Row
from specsim.bench.show import show_peaks, show_row
from specsim.bench.suites import SUITES, Group, Options
from specsim.core.errors import InputError, require, require_choice
from specsim.core.files import write_json
from specsim.core.provenance import now, versions
from specsim.core.rank_group import RankGroup
from specsim.models.shapes import shape


def check_options(options: Options) -> dict[str, Group]:
    """Choose the groups to run; InputError for impossible options and without a GPU."""
    require_choice("suite", options.suite, SUITES)
    groups = SUITES[options.suite].groups
    chosen = {name: group for name, group in groups.items() if options.only in name}
    require(chosen, "only", options.only, f"a part of a group's name: {', '.join(groups)}")
    require(options.seconds is None or options.seconds > 0, "seconds", options.seconds, "a number above 0")
    shape(options.shape)
    size = options.tensor_parallel
    if SUITES[options.suite].needs_ranks:
        require(size > 1, "tensor_parallel", size, f"at least 2 with the suite {options.suite}")
    else:
        require(size == 1, "tensor_parallel", size, f"1 with the suite {options.suite}")
    if SUITES[options.suite].needs_gpu and not torch.cuda.is_available():
        raise InputError("device", "cpu", "a GPU that CUDA can use: the fast implementation is timed nowhere else")
    return chosen


def bench(options: Options, command: str = "", json_file: Path | None = None, console: Console | None = None) -> Result:
    """Run a suite; rows are printed, and json_file is rewritten, as they come."""
    groups = check_options(options)
    start = time.perf_counter()
    most = options.seconds or SUITES[options.suite].seconds
    torch.manual_seed(0)
    on_gpu = SUITES[options.suite].needs_gpu
    peaks = clock.measure_peaks() if on_gpu else None
    result = Result(options, command, now(), {}, peaks)
    if peaks is not None:
        torch.cuda.empty_cache()
        if console:
            show_peaks(peaks, console)
    for row, group, may_end in _rows(groups, options, peaks or UNMEASURED):
        seconds = time.perf_counter() - start
        if row:
            result = replace(result, rows=(*result.rows, row), unfinished=result.unfinished + 1, seconds=seconds)
        else:
            result = replace(result, finished=(*result.finished, group), unfinished=0, seconds=seconds)
        if row and console:
            show_row(row, console)
        result = replace(result, versions=versions("cuda" if on_gpu else "cpu", only_imported=True))
        write_json(json_file, result.to_json())
        if may_end and _any_rank(options, seconds >= most):
            break
    return result


def _any_rank(options: Options, is_over: bool) -> bool:
    """Check whether the time of any rank is over, as all have to end after the same row."""
    ranks = RankGroup.joined(options.tensor_parallel)
    return is_over if ranks is None else any(ranks.gather_objects(is_over))


def _rows(groups: dict[str, Group], options: Options, peaks: Peaks) -> Iterator[tuple[Row | None, str, bool]]:
    """Yield every row with its group's name, None when a group is finished, and whether the run may end there."""
    for name, group in groups.items():
        for made in group(options, peaks):
            is_alone = isinstance(made, Row)
            for row in (made,) if is_alone else made:
                yield replace(row, group=name), name, is_alone
        yield None, name, True
