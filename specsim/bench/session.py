"""Runs of suites: rows as they come, and the result of all of them."""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from specsim.bench import clock
from specsim.bench.roofline import UNMEASURED, Peaks
from specsim.bench.row import BenchRow, Timing
from specsim.bench.suites import SUITES, Group, Options
from specsim.core.display import figure, near, paragraph, print_table
from specsim.core.errors import InputError, require, require_choice
from specsim.core.files import write_json
from specsim.core.json_schema import schema_name
from specsim.core.provenance import now, versions
from specsim.core.rank_group import RankGroup
from specsim.models.shapes import shape


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a suite of benchmarks.

    unfinished: number of rows, the last ones, whose group is not complete.
    """

    options: Options
    command: str  # command line that gives the same result
    date: str  # date and time of the run in UTC, to the second
    versions: dict[str, str]
    peaks: Peaks | None  # None for a suite of the CPU
    rows: tuple[BenchRow, ...] = ()
    seconds: float = 0.0  # wall-clock time of the run, in seconds
    finished: tuple[str, ...] = ()  # groups with all of their rows
    unfinished: int = 0  # rows at the end that are of no complete group

    @property
    def is_complete(self) -> bool:
        """Whether all rows of the suite are there."""
        return not self.options.quick and set(self.finished) == set(SUITES[self.options.suite].groups)

    @property
    def passed(self) -> bool:
        """Whether every equality check of the run passed."""
        return all(row.passed for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return {
            "schema": schema_name("bench"),
            "suite": self.options.suite,
            "shape": self.options.shape,
            "command": self.command,
            "date": self.date,
            "versions": self.versions,
            "measured_peaks": self.peaks and asdict(self.peaks),
            "seconds": self.seconds,
            "finished": list(self.finished),
            "unfinished": self.unfinished,
            "is_complete": self.is_complete,
            "is_quick": self.options.quick,
            "passed": self.passed,
            "rows": [row.to_json() for row in self.rows],
        }


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


def _rows(groups: dict[str, Group], options: Options, peaks: Peaks) -> Iterator[tuple[BenchRow | None, str, bool]]:
    """Yield every row with its group's name, None when a group is finished, and whether the run may end there."""
    for name, group in groups.items():
        for entry in group(options, peaks):
            is_alone = isinstance(entry, BenchRow)
            for row in (entry,) if is_alone else entry:
                yield replace(row, group=name), name, is_alone
        yield None, name, True


def show_peaks(peaks: Peaks, console: Console) -> None:
    """Print the measured peaks of this run."""
    paragraph(
        console,
        f"Measured peaks of this run: {peaks.read / 1e12:.2f} TB/s read, {peaks.copy / 1e12:.2f} TB/s copied, "
        f"{peaks.dense / 1e12:.0f} TFLOP/s of dense bf16.",
    )


def setting_of(row: BenchRow) -> str:
    """Print a row's setting."""
    values = {name: f"{value:,}" if type(value) is int else value for name, value in row.setting.items()}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def microseconds(timing: Timing) -> str:
    """Print a median with its spread."""
    digits = 1 if timing.median_us < 1000 else 0
    return f"{timing.median_us:,.{digits}f} us ±{timing.spread / 2:.1f} %"


def show_row(row: BenchRow, console: Console) -> None:
    """Print a row in a few lines; only equal implementations have times."""
    out = console.out
    out(f"{row.name}: {setting_of(row)}", highlight=False)
    for name, check in row.checks.items():
        if check.passed:
            time = microseconds(row.timings[name]) if name in row.timings else "equal"
            out(f"    {name}: {time}", highlight=False)
        else:
            reason = check.difference or f"error {check.error:.3g}, allowed {check.limit:.3g}"
            out(f"    {name}: NOT EQUAL, so no time: {check.compared}: {reason}", highlight=False)
    if not math.isnan(row.ratio):
        out(f"    roofline bound: {figure(row.bound_us, 1)} us; ours / bound {figure(row.ratio)}", highlight=False)
    if row.figures:
        out("    " + "; ".join(f"{name} {value:,.4g}" for name, value in row.figures.items()), highlight=False)
    for target in row.targets:
        verdict = "reached" if target.reached else "NOT reached"
        out(
            f"    {target.name}: {near(target.value, target.limit)}; target {figure(target.limit)}, {verdict}",
            highlight=False,
        )
    for note in row.notes:
        out(f"    {note}", highlight=False)


def show_bound(row: BenchRow, console: Console) -> None:
    """Print the bytes of a row's roofline bound, tensor by tensor."""
    if row.bound is None or not row.bound.parts:
        return
    console.print()
    console.out(f"Roofline bound of {row.name}, {setting_of(row)}: {row.bound.bytes:,} bytes", highlight=False)
    print_table(
        console, ("tensor", "times", "bytes"), [(p.tensor, f"{p.count}", f"{p.bytes:,}") for p in row.bound.parts]
    )


def show(result: Result, console: Console) -> None:
    """Print the roofline bounds of rows that differ by their tensors, then the verdict."""
    printed_kinds = set()
    for row in result.rows:
        kind = row.bound and (row.name, tuple(part.tensor for part in row.bound.parts))
        if kind and kind not in printed_kinds:
            printed_kinds.add(kind)
            show_bound(row, console)
    console.print()
    targets = [target for row in result.rows for target in row.targets]
    reached = sum(target.reached for target in targets)
    if not result.is_complete:
        paragraph(console, f"The suite is not complete: {len(result.rows)} rows in {result.seconds:.0f} s.")
    failed = sum(not row.passed for row in result.rows)
    equal = "Every equality check passed" if result.passed else f"NOT EQUAL in {failed} of {len(result.rows)} rows"
    paragraph(console, f"{equal}; {reached} of {len(targets)} targets are reached.")
