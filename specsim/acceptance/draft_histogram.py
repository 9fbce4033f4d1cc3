"""Counts of a request's rounds from the histogram that vLLM reports and AIPerf passes on."""

from collections.abc import Mapping, Sequence
from typing import Any

from specsim.acceptance.content import Content
from specsim.core.errors import InputError
from specsim.core.limits import MOST_COUNT, MOST_STEPS, parse_number
from specsim.simulator.acceptance_record import Counts

_ALLOWED = "numbers of verify steps by accepted drafts: a list from 0 on, or an object with the drafts as keys"


def request_counts(content: Content, value: Mapping[str, Any]) -> Counts:
    """Count rounds by position; where drafts vary in number, also the rounds that proposed each position.

    Takes per_step_accepted and per_step_drafted, else acceptance_histogram_by_draft_length, else
    acceptance_histogram.
    """
    steps = content.count(value, "num_spec_tokens", most=MOST_STEPS) or 0
    if value.get("per_step_accepted") and value.get("per_step_drafted"):
        names = ("per_step_accepted", "per_step_drafted")
        accepted, drafted = (_counts(content, name, value[name], MOST_STEPS) for name in names)
        if len(accepted) != len(drafted):
            allowed = f"a list of {len(accepted)} rounds, as per_step_accepted (in {content.source})"
            raise InputError("per_step_drafted", f"{len(drafted)} rounds", allowed)
        return Counts.of_rounds(accepted, max(steps, *drafted), drafted)
    by_length = value.get("acceptance_histogram_by_draft_length")
    if isinstance(by_length, Mapping) and by_length:
        rows = {_position(content, length): dense(content, row) for length, row in by_length.items()}
        depth = max(steps, *rows)
        parts = [_of_length(row, length, depth) for length, row in rows.items()]
        return Counts.pooled(parts)
    return Counts.of_histogram(dense(content, value.get("acceptance_histogram")), steps)


def reported(content: Content, requests: Sequence[Mapping[str, Any]], counts: Sequence[Counts]) -> dict[str, Any]:
    """Pool the accept lengths and the proposed drafts that the requests state; None where one states none."""
    lengths = [request.get("mean_acceptance_length") for request in requests]
    drafts = [content.count(request, "num_draft_tokens") for request in requests]
    rounds = sum(request_total.rounds for request_total in counts)
    tokens = [
        content.number("mean_acceptance_length", length) * request_total.rounds
        for length, request_total in zip(lengths, counts, strict=True)
        if length is not None
    ]
    return {
        "reported_length": sum(tokens) / rounds if rounds and None not in lengths else None,
        "proposed_drafts": None if None in drafts else sum(count or 0 for count in drafts),
    }


def dense(content: Content, histogram: Any) -> list[int]:
    """Make a list of a histogram; keys of an object are numbers of accepted drafts."""
    if isinstance(histogram, Mapping):
        steps_by_drafts = {
            _position(content, drafts): content.integer("histogram", steps) for drafts, steps in histogram.items()
        }
        return [steps_by_drafts.get(drafts, 0) for drafts in range(max(steps_by_drafts, default=-1) + 1)]
    counts = _counts(content, "acceptance_histogram", histogram, MOST_COUNT)
    if len(counts) > MOST_STEPS + 1:
        allowed = f"at most {MOST_STEPS + 1}, for 0 to {MOST_STEPS} drafts (in {content.source})"
        raise InputError("acceptance_histogram", f"{len(counts)} entries", allowed)
    return counts


def _of_length(histogram: Sequence[int], length: int, depth: int) -> Counts:
    """Count the rounds that proposed `length` drafts, over `depth` positions."""
    counts = Counts.of_histogram(histogram, length)
    unproposed = (0,) * (depth - length)
    return Counts(
        counts.rounds,
        counts.accepted_drafts,
        counts.by_position[:depth] + unproposed,
        counts.default_reached[:length] + unproposed,
    )


def _counts(content: Content, name: str, values: Any, most: int) -> list[int]:
    if not isinstance(values, list):
        described = values if values is None or isinstance(values, (str, int, float)) else type(values)
        raise InputError(name, described, f"{_ALLOWED} (in {content.source})")
    return [content.integer(name, value, most) for value in values]


def _position(content: Content, key: object) -> int:
    if isinstance(key, str) and key.isdecimal():
        return content.integer("acceptance_histogram", parse_number(key), MOST_STEPS)
    raise InputError("acceptance_histogram", str(key), f"{_ALLOWED} (in {content.source})")
