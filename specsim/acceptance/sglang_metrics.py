"""Reader of SGLang's metrics: meta_info of responses, server information, Prometheus gauges and its log.

Names are those of several versions (sglang/srt/managers/tokenizer_manager.py and metrics collector).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specsim.acceptance.content import Content, dense, tool_figures
from specsim.core.errors import InputError, require
from specsim.core.limits import MOST_STEPS, MOST_WIDTH, parse_number
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts
from specsim.simulator.measurement import Rounded
from specsim.simulator.tool_figures import ToolFigures, common_steps

FORMAT = (
    "SGLang's responses (meta_info), /get_server_info (avg_spec_accept_length), /metrics page "
    "(sglang:spec_accept_length) and log (accept len)"
)
CONVENTION = (
    "spec_verify_ct counts rounds of a request, the histogram counts them by accepted drafts; accept lengths include "
    "the bonus token, and that of meta_info, completion tokens over rounds, also the token that prefill gives. With "
    "spec_cap_lens_histogram rounds verify some of their drafts, and conditional rates are the least that they can be."
)
_DRAFTS = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_REQUEST_FIGURES = {
    "rounds": ("spec_verify_ct",),
    "accepted": _DRAFTS,
    "proposed": _PROPOSED,
    "accept_rate": ("spec_accept_rate",),
    "tokens": ("completion_tokens",),
    "tokens_a_round": ("spec_accept_length",),
    "window_length": ("spec_cap_length",),
}
_WINDOWS = "spec_cap_lens_histogram"  # of ragged verification: rounds by verified nodes, root included
_ARGUMENTS = {
    "topk": ("speculative_eagle_topk", MOST_WIDTH),
    "num_steps": ("speculative_num_steps", MOST_STEPS),
    "num_draft_tokens": ("speculative_num_draft_tokens", MOST_WIDTH),
}  # the server's names, and the most of each
_GAUGE = re.compile(
    r"^sglang:spec_(accept_length|accept_rate|cap_length|block_accept_length|num_steps|num_draft_tokens)"
    r"(\{.*\})?[ \t]+([0-9.eE+-]+)",
    re.MULTILINE,
)
_GAUGES = {
    "accept_length": "accept_length",
    "accept_rate": "accept_rate",
    "window_length": "cap_length",
    "full_length": "block_accept_length",
}  # figures and gauges; 0 where there is none
_RUNNING = re.compile(r"#running-req: (\d+)")
_LENGTH = re.compile(r"accept len: ([0-9.]+)(?:, accept rate: ([0-9.]+))?")
_LOG_UNIT = 0.005  # half of the last printed place


def read(content: Content) -> list[AcceptanceRecord]:
    """Read the records of a file; [] for another file."""
    return list(_responses(content)) or [*_server(content), *_gauges(content), *_log(content)]


def _responses(content: Content) -> Iterator[AcceptanceRecord]:
    """Read the counts of every response, of a stream its last one; the setting, if the file has server information."""
    latest: dict[object, Mapping[str, Any]] = {}
    for index, value in enumerate(content.objects("spec_verify_ct")):
        name = value.get("id", index)
        if not isinstance(name, (str, int)):
            raise InputError("id", type(name), f"a text or a number (in {content.source})")
        latest[name] = value
    if not latest:
        return
    requests = list(latest.values())
    counts = [_request(content, request) for request in requests]
    depth = max(len(request_counts.by_position) for request_counts in counts)
    proposed = [content.count(request, *_PROPOSED) for request in requests]
    total = None if None in proposed else sum(drafts or 0 for drafts in proposed)
    setting = _setting(content) or {"num_draft_tokens": _draft_tokens(counts, total), "num_steps": depth or None}
    if total and total < sum(request_counts.rounds for request_counts in counts) * (setting["num_steps"] or 0):
        setting["proposed_drafts"] = total  # an adaptive chain: no tree has so few
    if depth and depth < (setting["num_steps"] or 0):
        counts = [_padded(request_counts, setting["num_steps"]) for request_counts in counts]
    windows = [_windows(content, request) for request in requests]
    if all(windows):
        setting["proposed_drafts"] = sum(sum(Counts.of_histogram(row).by_position[1:]) for row in windows)
    setting["stated"] = tuple(_figures(content, name, request) for name, request in latest.items())
    yield AcceptanceRecord.of_counts(counts, content.source, "sglang", CONVENTION, is_by_request=True, **setting)


def _figures(content: Content, name: object, value: Mapping[str, Any]) -> ToolFigures:
    key = next((key for key in _HISTOGRAMS if value.get(key)), None)
    histogram = () if key is None else tuple(dense(content, value[key]))
    label = f"response {name}"
    return tool_figures(
        content, label, value, _REQUEST_FIGURES, histogram=histogram, windows=tuple(_windows(content, value))
    )


def _windows(content: Content, value: Mapping[str, Any]) -> list[int]:
    """Count a request's rounds by verified nodes; [] without ragged verification."""
    return dense(content, content.items(_WINDOWS, value[_WINDOWS])) if value.get(_WINDOWS) else []


def _with_windows(counts: Counts, windows: Sequence[int]) -> Counts:
    """Bound the rounds that proposed each draft behind accepted ones by those that verified it."""
    if sum(windows) != counts.rounds:
        return counts
    verified = Counts.of_histogram(windows, len(counts.by_position) + 1).by_position[1:]
    reached = tuple(map(min, counts.default_reached, verified))
    is_possible = all(accepted <= most for accepted, most in zip(counts.by_position, reached, strict=True))
    return replace(counts, reached=reached) if is_possible else counts


def _setting(content: Content) -> dict[str, Any]:
    """Read the setting of the server's arguments; {} without them."""
    arguments = next(content.objects("speculative_num_steps"), None)
    return (
        {}
        if arguments is None
        else {ours: content.count(arguments, theirs, most=most) for ours, (theirs, most) in _ARGUMENTS.items()}
    )


def _padded(counts: Counts, steps: int) -> Counts:
    """Add the positions that no round of a request accepted, which a histogram leaves out."""
    missing = (0,) * (steps - len(counts.by_position))
    reached = counts.reached and counts.reached + missing
    return Counts(counts.rounds, counts.accepted_drafts, counts.by_position + missing, reached)


def _request(content: Content, value: Mapping[str, Any]) -> Counts:
    """Count a request's rounds by its histogram, else in all, from drafts or from the tokens after the first."""
    rounds = content.count(value, "spec_verify_ct") or 0
    name = next((name for name in _HISTOGRAMS if value.get(name)), None)
    if name is not None:
        counts = Counts.of_histogram(dense(content, content.items(name, value[name])))
        return _with_windows(counts, _windows(content, value))
    drafts = content.count(value, *_DRAFTS)
    if drafts is None:
        tokens = content.count(value, "completion_tokens")
        require(tokens is not None, "acceptance", content.source, "meta_info with accepted drafts or completion_tokens")
        drafts = max((tokens or 0) - 1 - rounds, 0)
    return Counts(rounds, drafts)


def _draft_tokens(counts: Sequence[Counts], proposed: int | None) -> int | None:
    """Derive the nodes of a round, root included, from the proposed drafts; None unless each round has as many."""
    rounds = sum(request_counts.rounds for request_counts in counts)
    depth = max(len(request_counts.by_position) for request_counts in counts)
    if not rounds or proposed is None or proposed % rounds or proposed // rounds < depth:
        return None
    return proposed // rounds + 1


def _server(content: Content) -> Iterator[AcceptanceRecord]:
    """Read the average of the server, over its ranks."""
    states = list(content.objects("avg_spec_accept_length"))
    if states:
        lengths = [content.number("avg_spec_accept_length", state["avg_spec_accept_length"]) for state in states]
        model = next(content.objects("model_path"), {}).get("model_path", "")
        yield _of_length(content, float(np.mean(lengths)), pair=str(model), **_setting(content))


def _gauges(content: Content) -> Iterator[AcceptanceRecord]:
    """Read the gauges, which show the latest interval of the server."""
    gauges: dict[str, dict[str, float]] = {}  # by name and labels
    for name, labels, text in _GAUGE.findall(content.text):
        gauges.setdefault(name, {})[labels] = content.number(f"sglang:spec_{name}", parse_number(text))
    lengths = {labels: length for labels, length in gauges.get("accept_length", {}).items() if length}
    if not lengths:
        return
    setting: dict[str, Any] = {
        name: content.integer(name, max(gauges[name].values()), _ARGUMENTS[name][1])
        for name in ("num_steps", "num_draft_tokens")
        if name in gauges
    }

    def figure(name: str, labels: str) -> Rounded | None:
        value = gauges.get(_GAUGES[name], {}).get(labels)
        return Rounded.of(value) if value else None

    stated = [
        ToolFigures(
            labels or "the server",
            {ours: f"sglang:spec_{theirs}" for ours, theirs in _GAUGES.items()},
            num_steps=setting.get("num_steps") or None,
            accept_length=figure("accept_length", labels),
            accept_rate=figure("accept_rate", labels),
            window_length=figure("window_length", labels),
            full_length=figure("full_length", labels),
        )
        for labels in lengths
    ]
    yield _of_length(content, float(np.mean(list(lengths.values()))), stated, **setting)


def _log(content: Content) -> Iterator[AcceptanceRecord]:
    """Read the accept lengths of a log's intervals, each weighted by the running requests."""
    if used := [(running, stated) for running, stated in _intervals(content) if running and _length(stated) >= 1]:
        weights, stated = zip(*used, strict=True)
        yield _of_length(content, float(np.average(list(map(_length, stated)), weights=weights)), stated)


def _length(stated: ToolFigures) -> float:
    return 0.0 if stated.accept_length is None else stated.accept_length.value


def _intervals(content: Content) -> Iterator[tuple[int, ToolFigures]]:
    """Yield running requests and accept length of every line of an interval that has both, with its rate."""
    for number, line in enumerate(content.text.split("\n"), start=1):
        _, _, interval = line.partition("Decode batch")
        running = _RUNNING.search(interval)
        if running and (length := _LENGTH.search(interval, running.end())):
            requests = content.integer("#running-req", parse_number(running[1]))
            rate = None if length[2] is None else content.number("accept rate", parse_number(length[2]))
            yield (
                requests,
                ToolFigures(
                    f"line {number}",
                    {"accept_length": "accept len", "accept_rate": "accept rate"},
                    accept_length=Rounded.of(content.number("accept len", parse_number(length[1])), _LOG_UNIT),
                    accept_rate=None if rate is None else Rounded.of(rate, _LOG_UNIT),
                    is_per_node=True,
                ),
            )


def _of_length(content: Content, length: float, stated: Sequence[ToolFigures] = (), **setting: Any) -> AcceptanceRecord:
    """Make a record of an accept length; its steps follow from rates where all of them give the same."""
    if not setting.get("num_steps"):
        setting["num_steps"] = common_steps(stated)
    return AcceptanceRecord(content.source, "sglang", CONVENTION, length, stated=tuple(stated), **setting)
