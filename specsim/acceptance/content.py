"""Contents of a metrics file: its text, and its JSON values where it has any."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specsim.core.errors import InputError
from specsim.core.files import parse_json_lines
from specsim.core.limits import MOST_COUNT, MOST_STEPS, parse_number, read_integer, read_number
from specsim.simulator.acceptance_record import Counts
from specsim.simulator.measurement import Rounded
from specsim.simulator.tool_figures import ToolFigures

_ALLOWED = "numbers of verify steps by accepted drafts: a list from 0 on, or an object with the drafts as keys"


@dataclass(frozen=True, slots=True)
class Content:
    """A file that was read."""

    source: str  # its path
    text: str
    values: tuple[Any, ...]  # its JSON value, or one of each line; () for other text

    @classmethod
    def of_text(cls, text: str, source: str) -> "Content":
        """Parse a text that is one JSON value, or one a line, as in an event stream."""
        try:
            return cls(source, text, tuple(parse_json_lines(text, "file", source, "JSON, or a JSON value a line")))
        except InputError:
            return cls(source, text, ())

    def objects(self, *keys: str) -> Iterator[Mapping[str, Any]]:
        """Yield every JSON object, however deep, that has all of these keys."""
        waiting = list(reversed(self.values))
        while waiting:
            value = waiting.pop()
            if isinstance(value, Mapping):
                if all(value.get(key) is not None for key in keys):
                    yield value
                waiting += reversed(list(value.values()))
            elif isinstance(value, list):
                waiting += reversed(value)

    def count(self, value: Mapping[str, Any], *names: str, most: int = MOST_COUNT) -> int | None:
        """Read the count that the first of these keys has; None without any; InputError for another value."""
        for name in names:
            if value.get(name) is not None:
                return self.integer(name, value[name], most)
        return None

    def integer(self, name: str, value: object, most: int = MOST_COUNT) -> int:
        """Check a count, an integer of at least 0, which some tools write as a float."""
        return read_integer(value, name, self.source, 0, most)

    def number(self, name: str, value: object) -> float:
        """Check a number of at least 0."""
        return read_number(value, name, self.source)

    def mapping(self, name: str, value: object) -> Mapping[str, Any]:
        """Check a JSON object."""
        if isinstance(value, Mapping):
            return value
        raise InputError(name, type(value), f"a JSON object (in {self.source})")

    def items(self, name: str, value: object) -> list[Any]:
        """Check a JSON list."""
        if isinstance(value, list):
            return value
        raise InputError(name, type(value), f"a JSON list (in {self.source})")


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


_REQUEST_FIGURES = {  # names of vLLM and AIPerf, then of TensorRT-LLM
    "rounds": ("num_spec_steps",),
    "accepted": ("num_accepted_draft_tokens", "total_accepted_draft_tokens"),
    "proposed": ("num_draft_tokens", "total_draft_tokens"),
    "accept_length": ("mean_acceptance_length",),
    "accept_rate": ("draft_acceptance_rate", "acceptance_rate"),
}


def request_figures(content: Content, index: int, value: Mapping[str, Any]) -> ToolFigures:
    """Collect what a request's counters state."""
    histogram = value.get("acceptance_histogram")
    counts = tuple(dense(content, histogram)) if histogram else ()
    steps = content.count(value, "num_spec_tokens", most=MOST_STEPS) or None
    return tool_figures(content, f"request {index}", value, _REQUEST_FIGURES, histogram=counts, num_steps=steps)


def tool_figures(
    content: Content, label: str, value: Mapping[str, Any], keys: Mapping[str, Sequence[str]], **others: Any
) -> ToolFigures:
    """Read the figures of an object, each by the first of its keys that is there; others: further figures."""
    names = {name: next((key for key in tried if value.get(key) is not None), "") for name, tried in keys.items()}
    names = {name: key for name, key in names.items() if key}
    figures = {name: Rounded.of(content.number(key, value[key])) for name, key in names.items()}
    return ToolFigures(label, names, **figures, **others)


def reported(content: Content, requests: Sequence[Mapping[str, Any]], counts: Sequence[Counts]) -> dict[str, Any]:
    """Pool the accept lengths and the proposed drafts that the requests state; None where one states none.

    The figures of each request come along, for the identities between them.
    """
    lengths = [request.get("mean_acceptance_length") for request in requests]
    lengths += [None] * any(request_total.with_drafts().undrafted for request_total in counts)  # those count all rounds
    drafts = [content.count(request, *_REQUEST_FIGURES["proposed"]) for request in requests]
    rounds = sum(request_total.rounds for request_total in counts)
    tokens = [
        content.number("mean_acceptance_length", length) * request_total.rounds
        for length, request_total in zip(lengths, counts, strict=False)
        if length is not None
    ]
    return {
        "reported_length": sum(tokens) / rounds if rounds and None not in lengths else None,
        "proposed_drafts": None if None in drafts else sum(count or 0 for count in drafts),
        "stated": tuple(request_figures(content, index, request) for index, request in enumerate(requests)),
    }


def dense(content: Content, histogram: Any) -> list[int]:
    """Make a list of a histogram; keys of an object are numbers of accepted drafts."""
    if isinstance(histogram, Mapping):
        steps = {_position(content, drafts): content.integer("histogram", count) for drafts, count in histogram.items()}
        return [steps.get(drafts, 0) for drafts in range(max(steps, default=-1) + 1)]
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
