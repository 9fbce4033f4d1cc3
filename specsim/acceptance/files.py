"""Acceptance records of files, whatever tool wrote them; AIPerf's exports and benchmark clients' results among them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specsim.acceptance import llamacpp_log, own_results, sglang_metrics, vllm_metrics
from specsim.acceptance.content import Content, dense, reported, request_counts
from specsim.core.display import short_setting
from specsim.core.errors import InputError, require
from specsim.core.files import read_text
from specsim.core.limits import MOST_STEPS
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts
from specsim.simulator.measurement import Report, Rounded
from specsim.simulator.report import read_reports
from specsim.simulator.results import SPECULATION
from specsim.simulator.tool_figures import ToolFigures, contradiction

AIPERF = "AIPerf's profile_export.jsonl (spec_decode_acceptance) and profile_export_aiperf.json"
AIPERF_CONVENTION = (
    "acceptance_histogram counts verify steps by accepted drafts, without the bonus token, which "
    "mean_acceptance_length includes."
)
_TOTALS = {  # of a run, by the figure that each states; the rate is in percent
    "rounds": "total_spec_decode_steps",
    "accepted": "total_accepted_draft_tokens",
    "accept_length": "spec_decode_token_weighted_acceptance_length",
    "accept_rate": "spec_decode_overall_draft_acceptance_rate",
}
_POOLED = "pooled_spec_decode_acceptance_histogram"
PROFILE = "a speculation profile of NVIDIA's Model Optimizer (acceptance_length_histogram)"
PROFILE_CONVENTION = "acceptance_length_histogram counts rounds by their tokens, bonus included."
REPORTS = "the results of benchmarks by vLLM, SGLang, GuideLLM, AIPerf and TensorRT-LLM"
REPORT_CONVENTION = (
    "accept lengths include the bonus token, accepted tokens count drafts only, rates are unconditional."
)
SHOWN = 8  # records that an error lists


def read_aiperf(content: Content) -> list[AcceptanceRecord]:
    """Read AIPerf's records of requests, or else the pooled histogram of a run; [] for another file.

    https://docs.nvidia.com/aiperf/reference/per-request-speculative-decoding-acceptance
    """
    values = [entry["spec_decode_acceptance"] for entry in content.objects("spec_decode_acceptance")]
    requests = [value for value in values if isinstance(value, Mapping)]
    if requests:
        counts = [request_counts(content, request) for request in requests]
        steps = max(content.count(request, "num_spec_tokens", most=MOST_STEPS) or 0 for request in requests)
        engines = {str(request["engine"]) for request in requests if request.get("engine")}
        tool = " ".join(["aiperf", *sorted(engines)])
        stated = reported(content, requests, counts)
        return [_aiperf_record(content, counts, tool, max(steps, *map(_depth, counts)), True, **stated)]
    return [_pooled(content, entry) for entry in content.objects(_POOLED)]


def _pooled(content: Content, value: Mapping[str, Any]) -> AcceptanceRecord:
    pooled = value[_POOLED]
    histogram = pooled.get("histogram", pooled) if isinstance(pooled, Mapping) else pooled
    rounds_by_drafts = dense(content, histogram)
    counts = Counts.of_histogram(rounds_by_drafts)
    figures: dict[str, Any] = {name: _average(content, value, key) for name, key in _TOTALS.items()}
    rate = figures.pop("accept_rate")
    stated = ToolFigures(
        "the run",
        {**_TOTALS, "the sum of the histogram": _POOLED},
        histogram=tuple(rounds_by_drafts),
        accept_rate=None if rate is None else rate / Rounded.of(100),
        **figures,
    )
    return _aiperf_record(content, [counts], "aiperf", _depth(counts), False, stated=(stated,))


def _average(content: Content, value: Mapping[str, Any], name: str) -> Rounded | None:
    """Read the average of one of AIPerf's figures, which it gives as a number or with its unit."""
    figure = value.get(name)
    figure = figure.get("avg") if isinstance(figure, Mapping) else figure
    return None if figure is None else Rounded.of(content.number(name, figure))


def _aiperf_record(
    content: Content, counts: list[Counts], tool: str, steps: int, by_request: bool, **stated: Any
) -> AcceptanceRecord:
    return AcceptanceRecord.of_counts(
        counts, content.source, tool, AIPERF_CONVENTION, num_steps=steps or None, is_by_request=by_request, **stated
    )


def _depth(counts: Counts) -> int:
    return len(counts.by_position)


def read_profile(content: Content) -> list[AcceptanceRecord]:
    """Read the rounds of a speculation profile by their tokens; [] for another file."""
    return [_profile(content, value) for value in content.objects("acceptance_length_histogram", "method")]


def _profile(content: Content, value: Mapping[str, Any]) -> AcceptanceRecord:
    histogram = dense(content, value["acceptance_length_histogram"])[1:]  # a round has at least its bonus token
    steps = content.count(value, "num_speculative_tokens", most=MOST_STEPS)
    length = value.get("mean_accept_length")
    stated = ToolFigures(
        "the profile",
        {"accept_length": "mean_accept_length", "the sum of the rates by position": "marginal_accept_rates"},
        accept_length=None if length is None else Rounded.of(content.number("mean_accept_length", length)),
        histogram=tuple(histogram),
        rates=tuple(
            Rounded.of(content.number("marginal_accept_rates", rate))
            for rate in content.items("marginal_accept_rates", value.get("marginal_accept_rates") or [])
        ),
        num_steps=steps or None,
    )
    counts = Counts.of_histogram(histogram, steps)
    return AcceptanceRecord.of_counts(
        [counts], content.source, "model-optimizer", PROFILE_CONVENTION, topk=1, stated=(stated,)
    )


def read_benchmarks(content: Content) -> list[AcceptanceRecord]:
    """Read the runs of a result that had drafts; [] for another file."""
    try:
        reports = read_reports(Path(content.source))
    except InputError:
        return []
    return [record for report in reports if (record := _benchmark_record(content, report)) is not None]


def _benchmark_record(content: Content, report: Report) -> AcceptanceRecord | None:
    length = report.figures.get(SPECULATION[0])
    tool = report.label.partition(",")[0]
    if length is None:
        return None
    rounds = report.num_rounds
    accepted = report.num_accepted_drafts
    rates = report.rates_by_position
    if not rounds or accepted is None:
        steps = len(rates) or None
        return AcceptanceRecord(content.source, tool, REPORT_CONVENTION, length, num_steps=steps, rates=rates)
    counts = tuple(round(rate * rounds) for rate in rates)
    is_exact = bool(rates) and sum(counts) == accepted
    drafts = report.num_drafts
    steps = len(rates) or (drafts // rounds if drafts and drafts % rounds == 0 else None)
    total = Counts(rounds, accepted, counts if is_exact else ())
    length = 1 + accepted / rounds
    setting = {"topk": 1, "num_steps": steps, "proposed_drafts": drafts}
    return AcceptanceRecord(content.source, tool, REPORT_CONVENTION, length, counts=(total,), rates=rates, **setting)


# By the name of a format, its reader.
_READERS: dict[str, Callable[[Content], list[AcceptanceRecord]]] = {
    own_results.FORMAT: own_results.read,
    AIPERF: read_aiperf,
    vllm_metrics.FORMAT: vllm_metrics.read,
    sglang_metrics.FORMAT: sglang_metrics.read,
    llamacpp_log.FORMAT: llamacpp_log.read,
    PROFILE: read_profile,
    REPORTS: read_benchmarks,
}
FORMATS = "; ".join(_READERS)


def read_records(path: Path | str, name: str = "acceptance") -> list[AcceptanceRecord]:
    """Read every record of a file; InputError, with the known formats, for a file that holds none."""
    content = Content.of_text(read_text(Path(path), name, "a UTF-8 file that can be read"), str(path))
    for read in _READERS.values():
        try:
            records = read(content)
        except InputError as error:
            raise error.within(content.source) from error
        if records:
            return records
    raise InputError(name, str(path), f"a file with acceptance of drafts: {FORMATS}")


def read_record(location: Path | str, name: str = "acceptance") -> AcceptanceRecord:
    """Read the one record of a file, or number N of several as FILE#N; InputError otherwise."""
    path, _, number = str(location).rpartition("#")
    if not path or not number.isdecimal():
        path, number = str(location), ""
    records = read_records(path, name)
    if number:
        if 1 <= int(number) <= len(records):
            return _consistent(records[int(number) - 1], name)
        raise InputError(name, str(location), f"one of {len(records)} records, {path}#1 to {path}#{len(records)}")
    if len(records) == 1:
        return _consistent(records[0], name)
    listed = [f"{path}#{index} ({_name(record)})" for index, record in enumerate(records[:SHOWN], start=1)]
    more = ", ..." if len(records) > SHOWN else ""
    raise InputError(name, path, f"one record; the file has {len(records)}: {', '.join(listed)}{more}")


def _consistent(record: AcceptanceRecord, name: str) -> AcceptanceRecord:
    """Refuse a record whose figures contradict each other."""
    broken = next(filter(None, map(contradiction, record.stated)), "")
    allowed = f"figures that agree ({broken}); specsim lint-report {record.source} lists all"
    require(not broken, name, record.source, allowed)
    return record


def _name(record: AcceptanceRecord) -> str:
    """Name a record by its pair, setting and temperature, as far as they are known."""
    parts = [record.pair, "" if record.config is None else short_setting(record.config)]
    if record.temperature is not None:
        parts.append(f"T={record.temperature:g}")
    return " ".join(part for part in parts if part) or record.tool
