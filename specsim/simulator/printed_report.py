"""Reports as `vllm bench serve` and `sglang.bench_serving` print them, also within a log."""

import math
import re

from specsim.core.errors import InputError
from specsim.simulator.measurement import LATENCIES, SPECULATION, STATISTICS, THROUGHPUTS, Report

HEADER = re.compile(r"^\s*=+ Serving Benchmark Result =+\s*$", re.MULTILINE)
_END = re.compile(r"^\s*=+\s*$", re.MULTILINE)
_LINE = re.compile(r"^\s*(\S.*?):[ \t]+(\S.*?)\s*$", re.MULTILINE)
HALF_UNIT = 0.005  # figures are printed with two decimals
_FIGURES = {
    "output token throughput (tok/s)": THROUGHPUTS[0],
    "request throughput (req/s)": THROUGHPUTS[1],
    "total token throughput (tok/s)": THROUGHPUTS[2],
    "acceptance length": SPECULATION[0],
    "accept length": SPECULATION[0],
    "acceptance rate (%)": SPECULATION[1],
    **{f"{how} {what} (ms)".lower(): f"{how} {what} (ms)" for what in LATENCIES for how in STATISTICS},
    **{f"{how} E2EL (ms)".lower(): f"{how} E2E Latency (ms)" for how in STATISTICS},
}
_LIMITS = ("maximum request concurrency", "max request concurrency")
_RATES = ("request rate configured (rps)", "traffic request rate")


def is_printed(text: str) -> bool:
    """Whether a text holds a printed report."""
    return HEADER.search(text) is not None


def read_printed(text: str, place: str) -> list[Report]:
    """Read the reports in a text, in order; InputError for a report without figures, or with another value as one."""
    blocks = HEADER.split(text)[1:]
    return [_report(_END.split(block)[0], place, run) for run, block in enumerate(blocks, start=1)]


def _report(block: str, place: str, run: int) -> Report:
    printed = {name.lower(): value for name, value in _LINE.findall(block)}
    figures = {ours: _number(printed, theirs, place) for theirs, ours in _FIGURES.items() if theirs in printed}
    if not figures:
        raise InputError("file", place, f"a result of vLLM's or SGLang's benchmark (run {run} has no figures)")
    positions = [name for name in printed if re.fullmatch(r"position \d+", name)]
    return Report(
        f"{'sglang' if 'backend' in printed else 'vllm'}, run {run}",
        {name: value for name, value in figures.items() if value is not None},
        concurrency=_count(printed, place, *_LIMITS),
        duration=_number(printed, "benchmark duration (s)", place),
        completed=_count(printed, place, "successful requests"),
        input_tokens=_count(printed, place, "total input tokens"),
        output_tokens=_count(printed, place, "total generated tokens"),
        rates_by_position=tuple((_number(printed, name, place) or 0.0) / 100 for name in positions),
        rate=next((rate for name in _RATES if (rate := _number(printed, name, place)) is not None), None),
        num_rounds=_count(printed, place, "drafts"),
        num_drafts=_count(printed, place, "draft tokens"),
        num_accepted_drafts=_count(printed, place, "accepted tokens"),
        mean_in_flight=_number(printed, "concurrency", place),
        rounding=HALF_UNIT,
    )


def _count(printed: dict[str, str], place: str, *names: str) -> int | None:
    """Read the number of the first of these lines that exists."""
    numbers = (_number(printed, name, place) for name in names)
    number = next((each for each in numbers if each is not None), None)
    return None if number is None else int(number)


def _number(printed: dict[str, str], name: str, place: str) -> float | None:
    """Read the number of a line; None without the line, or where it names no limit."""
    text = printed.get(name)
    if text is None or text.lower() in ("not set", "none", "inf", "trace"):
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(name, text, f"a number of at least 0 (in {place})")
    return number
