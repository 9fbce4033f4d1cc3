"""Figures of acceptance as a tool states them: several of one quantity, which have to agree.

A tool counts rounds, proposed and accepted drafts, and states lengths and rates that follow from these. So every two
figures of one quantity are an identity; the tables QUANTITIES and BOUNDS hold all of them for every format.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from specsim.simulator.measurement import Rounded

Verdict = Literal["holds", "cannot be true", "follows"]
EXACT = 1e-3  # relative error of an identity whose printed places are not known
_INTEGER = 3 * EXACT  # relative error of a quotient of figures that has to be an integer


@dataclass(frozen=True, slots=True)
class ToolFigures:
    """Figures of one request, interval, rank or run; None, or empty, where the tool does not state them."""

    label: str  # where in the file
    names: Mapping[str, str] = field(default_factory=dict)  # the tool's names, by those of the fields
    rounds: Rounded | None = None  # with drafts
    accepted: Rounded | None = None  # drafts
    proposed: Rounded | None = None  # drafts
    accept_length: Rounded | None = None  # tokens of a round, bonus included
    accept_rate: Rounded | None = None  # accepted / proposed drafts
    histogram: tuple[int, ...] = ()  # rounds that accepted 0, 1, ... drafts
    rates: tuple[Rounded, ...] = ()  # share of rounds that accept at least 1, 2, ... drafts
    tokens: Rounded | None = None  # output tokens, that of the prefill included
    tokens_a_round: Rounded | None = None  # tokens / rounds
    num_steps: int | None = None  # drafts of a chain in every round
    window_length: Rounded | None = None  # nodes that a round verifies, root included, of ragged verification
    windows: tuple[int, ...] = ()  # rounds that verified 0, 1, ... nodes, root included
    full_length: Rounded | None = None  # accept length if every round verified all its drafts
    is_per_node: bool = False  # whether the rate may be tokens of a round / nodes, as older versions of SGLang write it
    interval: tuple[Rounded, Rounded] | None = None  # ends of the confidence interval of the accept length


def _count(value: float) -> Rounded:
    return Rounded.of(value)


def _of_histogram(figures: ToolFigures) -> Rounded | None:
    return _count(sum(figures.histogram)) if figures.histogram else None


def _accepted_of_histogram(figures: ToolFigures) -> Rounded | None:
    counts = enumerate(figures.histogram)
    return _count(sum(drafts * rounds for drafts, rounds in counts)) if figures.histogram else None


def _length_of_counts(figures: ToolFigures) -> Rounded | None:
    rounds = figures.rounds or _of_histogram(figures)
    accepted = figures.accepted or _accepted_of_histogram(figures)
    return None if not rounds or not rounds.value or not accepted else _count(1) + accepted / rounds


def _length_of_rates(figures: ToolFigures) -> Rounded | None:
    return sum(figures.rates, _count(1)) if figures.rates else None


def _rate_of_counts(figures: ToolFigures) -> Rounded | None:
    accepted, proposed = figures.accepted, figures.proposed
    return accepted / proposed if accepted is not None and proposed is not None and proposed.value else None


def _drafts_of_windows(figures: ToolFigures) -> Rounded | None:
    nodes = enumerate(figures.windows)
    return _count(sum((count - 1) * rounds for count, rounds in nodes if count)) if figures.windows else None


def _length_of_windows(figures: ToolFigures) -> Rounded | None:
    drafts, rounds = _drafts_of_windows(figures), sum(figures.windows)
    return None if drafts is None or not rounds else _count(1) + drafts / _count(rounds)


def _tokens_of_rounds(figures: ToolFigures) -> Rounded | None:
    tokens, rounds = figures.tokens, figures.rounds
    return tokens / rounds if tokens is not None and rounds is not None and rounds.value else None


Derivation = Callable[[ToolFigures], Rounded | None]


def _stated(name: str) -> Derivation:
    return lambda figures: getattr(figures, name)


# By quantity, the ways in which a tool may state it; a name of a field stands for what the tool calls it.
QUANTITIES: dict[str, dict[str, Derivation]] = {
    "rounds": {"rounds": _stated("rounds"), "the sum of the histogram": _of_histogram},
    "accepted drafts": {"accepted": _stated("accepted"), "the drafts of the histogram": _accepted_of_histogram},
    "accept length": {
        "accept_length": _stated("accept_length"),
        "1 + accepted drafts / rounds": _length_of_counts,
        "1 + the sum of the rates by position": _length_of_rates,
    },
    "accept rate": {"accept_rate": _stated("accept_rate"), "accepted / proposed drafts": _rate_of_counts},
    "verified nodes a round": {"window_length": _stated("window_length"), "those of the windows": _length_of_windows},
    "tokens a round": {"tokens_a_round": _stated("tokens_a_round"), "tokens / rounds": _tokens_of_rounds},
}


def _steps_times_rounds(figures: ToolFigures) -> Rounded | None:
    rounds = figures.rounds or _of_histogram(figures)
    return _count(figures.num_steps) * rounds if figures.num_steps and rounds else None


def _all_round_tokens(figures: ToolFigures) -> Rounded | None:
    rounds, accepted = figures.rounds, figures.accepted or _accepted_of_histogram(figures)
    return _count(1) + rounds + accepted if rounds is not None and accepted is not None else None


def _end(index: int) -> Derivation:
    return lambda figures: None if figures.interval is None else figures.interval[index]


# Figures that others bound: name and figure, then name of the bound and the bound.
BOUNDS: tuple[tuple[str, Derivation, str, Derivation], ...] = (
    ("accepted", _stated("accepted"), "proposed", _stated("proposed")),
    ("the drafts of the histogram", _accepted_of_histogram, "proposed", _stated("proposed")),
    ("proposed", _stated("proposed"), "steps · rounds", _steps_times_rounds),
    ("the drafts of the histogram", _accepted_of_histogram, "steps · rounds", _steps_times_rounds),
    ("accepted", _stated("accepted"), "the drafts of the windows", _drafts_of_windows),
    ("accept_length", _stated("accept_length"), "window_length", _stated("window_length")),
    ("accept_length", _stated("accept_length"), "full_length", _stated("full_length")),
    ("tokens", _stated("tokens"), "1 + rounds + accepted drafts", _all_round_tokens),
    ("accept_rate", _stated("accept_rate"), "1", lambda _: _count(1)),
    ("the interval's low", _end(0), "accept_length", _stated("accept_length")),
    ("accept_length", _stated("accept_length"), "the interval's high", _end(1)),
)


def verdicts(figures: ToolFigures) -> Iterator[tuple[str, Verdict, str]]:
    """Check every identity that the figures allow: its name, its verdict, and the reason with figures."""
    for quantity, ways in QUANTITIES.items():
        values = [(figures.names.get(name, name), value) for name, way in ways.items() if (value := way(figures))]
        for name, value in values[1:]:
            first_name, first = values[0]
            is_count = quantity in ("rounds", "accepted drafts")
            is_equal = first.equals(value, 0.0 if is_count else EXACT)
            says = f"{first_name} {first.value:g}, {name} {value.value:g}"
            yield f"{quantity}: all figures agree", "holds" if is_equal else "cannot be true", says
    for name, way, bound_name, way_of_bound in BOUNDS:
        value, bound = way(figures), way_of_bound(figures)
        if value is not None and bound is not None:
            is_within = value.low <= bound.high * (1 + EXACT)
            names = figures.names.get(name, name), figures.names.get(bound_name, bound_name)
            says = f"{names[0]} {value.value:g}, {names[1]} {bound.value:g}"
            yield f"{name} ≤ {bound_name}", "holds" if is_within else "cannot be true", says
    yield from _steps(figures)


def _steps(figures: ToolFigures) -> Iterator[tuple[str, Verdict, str]]:
    """Compare length and rate without counts: some number of drafts a round has to give both."""
    length, rate = figures.accept_length, figures.accept_rate
    if length is None or rate is None or figures.proposed is not None or not rate.value:
        return
    says = f"accept length {length.value:g} at a rate of {rate.value:g}"
    if figures.num_steps:
        says += f", {figures.num_steps} drafts a round"
    steps = {*_steps_per_draft(figures), *_steps_per_node(figures)}
    is_ok = figures.num_steps in steps if figures.num_steps else bool(steps)
    says += "" if is_ok or figures.num_steps else ": no number of drafts gives both"
    yield "accept length = 1 + K · accept rate", "holds" if is_ok else "cannot be true", says


def _steps_per_draft(figures: ToolFigures) -> list[int]:
    """List the numbers of drafts a round that give length and rate, accepted / proposed drafts."""
    length, rate = figures.accept_length, figures.accept_rate
    if length is None or rate is None or not rate.value:
        return []
    return [count for count in ((length - _count(1)) / rate).integers(_INTEGER) if count > 0]


def _steps_per_node(figures: ToolFigures) -> list[int]:
    """List them for a rate that is tokens of a round / nodes."""
    length, rate = figures.accept_length, figures.accept_rate
    if length is None or rate is None or not rate.value or not figures.is_per_node:
        return []
    return [count - 1 for count in (length / rate).integers(_INTEGER) if count > 1]


def common_steps(stated: Sequence[ToolFigures]) -> int | None:
    """Derive the drafts of a round, (length - 1) / rate, from figures with a rate; None unless one number fits all."""
    rated = [figures for figures in stated if figures.accept_rate is not None and figures.accept_rate.value]
    fitting = [
        set.intersection(*(set(way(figures)) for figures in rated)) if rated else set()
        for way in (_steps_per_draft, _steps_per_node)
    ]
    both = set.union(*fitting)
    return both.pop() if len(both) == 1 else None


def contradiction(figures: ToolFigures) -> str:
    """Name the first identity that does not hold; "" without one."""
    broken = (f"{figures.label}: {says}" for _, verdict, says in verdicts(figures) if verdict == "cannot be true")
    return next(broken, "")
