"""Acceptance record: the acceptance of one setting, whatever tool measured it, in one convention.

Accept lengths include the bonus token; rates by position are unconditional unless they say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from html import escape
from itertools import accumulate, pairwise, takewhile
from operator import mul
from typing import Any, Self

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_int, require_type
from specsim.core.files import without_nan
from specsim.core.limits import MOST_COUNT, MOST_STEPS, MOST_WIDTH
from specsim.simulator.bounds import integer, number, probability
from specsim.simulator.rank_by_depth import Shares
from specsim.simulator.tool_figures import ToolFigures
from specsim.simulator.varying_drafts import FullRounds, full_rounds

_SHARE_OF_DRAFTS = 0.99  # least share of the proposed drafts that is all of them: the last round of a request is short
_INTEGERS = (  # fields of a record with their least and most
    ("topk", 1, MOST_WIDTH),
    ("num_steps", 0, MOST_STEPS),
    ("num_draft_tokens", 1, MOST_WIDTH),
    ("proposed_drafts", 0, MOST_COUNT),
)


@dataclass(frozen=True, slots=True)
class Interval:
    """Confidence interval of a figure."""

    low: float  # lower end
    high: float  # upper end
    confidence: float  # 0.95 for 95 %
    method: str  # method, in a few words


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over the rounds of a request, or of several requests together."""

    rounds: int  # rounds with drafts
    accepted_drafts: int  # over all rounds, without bonus tokens
    by_position: tuple[int, ...] = ()  # rounds that accepted at least 1, 2, ... drafts; () where the tool gives none
    reached: tuple[int, ...] = ()  # rounds that proposed draft 1, 2, ... behind accepted ones; (): each accepting round
    undrafted: int = 0  # further rounds, without drafts, as far as the tool counts them

    def __post_init__(self) -> None:
        require_int("rounds", self.rounds, 0, MOST_COUNT)
        require_int("accepted_drafts", self.accepted_drafts, 0, MOST_COUNT)
        require_int("undrafted", self.undrafted, 0, MOST_COUNT)
        for name in ("by_position", "reached"):
            values = tuple(integer(name, count, 0) for count in getattr(self, name))
            object.__setattr__(self, name, values)
            if any(later > earlier for earlier, later in pairwise((self.rounds, *values))):
                raise InputError(name, values, f"counts of rounds, at most {self.rounds}, none above the one before")
        if self.by_position and sum(self.by_position) != self.accepted_drafts:
            raise InputError("accepted_drafts", self.accepted_drafts, f"{sum(self.by_position)}, as by position")
        if self.reached and any(a > b for a, b in zip(self.by_position, self.reached, strict=False)):
            raise InputError("reached", self.reached, f"at least the accepted, {self.by_position}")

    @classmethod
    def of_rounds(cls, accepted: Sequence[int], num_steps: int, proposed: Sequence[int] = ()) -> Self:
        """Count the rounds of a request.

        proposed: depth of each round's deepest draft, 0 for a round without drafts; (): always num_steps.
        """
        require_int("num_steps", num_steps, 0, MOST_STEPS)
        for name, values in (("accepted", accepted), ("proposed", proposed)):
            for value in values:
                require_int(name, value, 0, num_steps)
        if proposed and len(proposed) != len(accepted):
            raise InputError("proposed", f"{len(proposed)} rounds", f"{len(accepted)} rounds, as accepted")
        depths = proposed or [num_steps] * len(accepted)
        tried = [min(drafts + 1, depth) for drafts, depth in zip(accepted, depths, strict=True)]
        counts = cls(len(accepted), sum(accepted), _at_least(accepted, num_steps), _at_least(tried, num_steps))
        return counts.with_drafts()

    @classmethod
    def of_histogram(cls, histogram: Sequence[int], num_steps: int | None = None) -> Self:
        """Count rounds from the number of those that accepted exactly 0, 1, 2, ... drafts."""
        for count in histogram:
            integer("histogram", count, 0)
        least = _tails(histogram)
        missing = max(0, (num_steps or 0) - len(least))
        return cls(sum(histogram), sum(least), least + (0,) * missing)

    @classmethod
    def pooled(cls, parts: Sequence["Counts"]) -> "Counts":
        """Add the counts of several requests; positions are kept if every request with rounds has them."""
        used = [counts for counts in parts if counts.rounds]
        depth = max((len(counts.by_position) for counts in used), default=0)
        has_positions = depth and all(counts.by_position for counts in used)
        by_position = _sums([counts.by_position for counts in used], depth) if has_positions else ()
        is_adaptive = has_positions and any(counts.reached for counts in used)
        reached = _sums([counts.reached or counts.default_reached for counts in used], depth) if is_adaptive else ()
        return cls(
            sum(counts.rounds for counts in parts),
            sum(counts.accepted_drafts for counts in parts),
            by_position,
            reached,
            sum(counts.undrafted for counts in parts),
        )

    def with_drafts(self) -> Self:
        """Leave out the rounds that proposed no draft, as the counters of vLLM do."""
        if not self.reached or self.reached[0] == self.rounds:
            return self
        undrafted = self.undrafted + self.rounds - self.reached[0]
        return replace(self, rounds=self.reached[0], undrafted=undrafted)

    @property
    def default_reached(self) -> tuple[int, ...]:
        """Rounds that proposed each draft if every round proposes all of them."""
        return (self.rounds, *self.by_position[:-1])[: len(self.by_position)]


@dataclass(frozen=True, slots=True)
class AcceptanceRecord:
    """Acceptance of one setting, as a tool measured it."""

    source: str  # file or command
    tool: str  # program that counted
    convention: str  # counting rule of the tool, in a sentence
    accept_length: float  # mean tokens of a round, bonus included
    topk: int | None = None  # None: unknown, taken for a chain where nothing speaks against it
    num_steps: int | None = None  # None: unknown
    num_draft_tokens: int | None = None  # nodes that the target verifies, root included; None: unknown
    counts: tuple[Counts, ...] = ()  # of every request, or one for all; () without counts
    is_by_request: bool = False  # whether each of the counts is that of a request
    rates: tuple[float, ...] = ()  # share of rounds that accept at least 1, 2, ... drafts; () if unknown
    shares: Shares = ()  # probability of acceptance by depth and rank among siblings; () if unknown
    interval: Interval | None = None  # of the accept length; None: not computed
    reported_length: float | None = None  # accept length in the tool's own words; None if it has another definition
    reported_rounding: float = 0.0  # half of the last printed place of the reported length
    proposed_drafts: int | None = None  # over all rounds; None if unknown
    total: Counts | None = field(init=False, repr=False, compare=False)  # over all requests; None without counts
    pair: str = ""  # target and drafter
    prompts: str = ""  # digest of the prompts; empty if unknown
    temperature: float | None = None  # None: unknown
    stated: tuple[ToolFigures, ...] = field(default=(), repr=False, compare=False)  # all figures of the file

    def __post_init__(self) -> None:
        number("accept_length", self.accept_length, 1)
        for name, least, most in _INTEGERS:
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), least, most)
        number("reported_rounding", self.reported_rounding)
        for name in ("reported_length", "temperature"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name))
        for name in ("source", "tool", "convention", "pair", "prompts"):
            require_type(name, getattr(self, name), str, "a text")
        rates = tuple(probability("rates", rate) for rate in self.rates)
        require(len(rates) <= MOST_STEPS, "rates", f"{len(rates)} positions", f"at most {MOST_STEPS}")
        if any(later > earlier for earlier, later in pairwise((1.0, *rates))):
            raise InputError("rates", rates, "unconditional rates, none larger than the one before")
        object.__setattr__(self, "rates", rates)
        total = Counts.pooled(self.counts) if self.counts else None
        object.__setattr__(self, "total", total)
        if total is not None and total.by_position and len(total.by_position) != len(rates):
            allowed = f"{len(total.by_position)}, as many as the counts have"
            raise InputError("rates", f"{len(rates)} positions", allowed)

    @classmethod
    def of_counts(cls, counts: Sequence[Counts], source: str, tool: str, convention: str, **others: Any) -> Self:
        """Make the record of counts, whose accept length and rates follow from them; InputError without a round."""
        counts = [request.with_drafts() for request in counts]
        total = Counts.pooled(counts)
        require(total.rounds, "acceptance", source, "a file with at least one round of drafts (it has none)")
        rates = tuple(count / total.rounds for count in total.by_position)
        derived = {"rates": rates, "num_steps": len(rates) or None}
        length = 1 + total.accepted_drafts / total.rounds
        nonempty = tuple(request for request in counts if request.rounds or request.undrafted)
        return cls(source, tool, convention, length, counts=nonempty, **derived | others)

    def with_drafts(self) -> Self:
        """Leave out the rounds without drafts, which earlier versions of this package counted."""
        counts = tuple(request.with_drafts() for request in self.counts)
        if counts == self.counts:
            return self
        total = Counts.pooled(counts)
        require(total.rounds, "acceptance", self.source, "a record with at least one round of drafts (it has none)")
        rates = tuple(count / total.rounds for count in total.by_position)
        length = 1 + total.accepted_drafts / total.rounds
        return replace(self, counts=counts, accept_length=length, rates=rates, interval=None)

    @property
    def rounds(self) -> int | None:
        """Number of rounds with drafts; None if unknown."""
        return None if self.total is None else self.total.rounds

    @property
    def is_chain(self) -> bool:
        """Whether every draft has one child at most, as far as the tool says."""
        if self.topk is not None:
            return self.topk == 1
        return self.num_draft_tokens is None or self.num_draft_tokens == (self.num_steps or 0) + 1

    @property
    def config(self) -> SpecConfig | None:
        """The setting; None where a part of it is unknown."""
        if not self.num_steps:
            return None
        if self.is_chain:
            return SpecConfig(1, self.num_steps, self.num_steps + 1)
        if self.topk is None or self.num_draft_tokens is None:
            return None
        return SpecConfig(self.topk, self.num_steps, self.num_draft_tokens)

    @property
    def mean_drafts(self) -> float | None:
        """Drafts of a round on average, where rounds of a chain differ in number; None where they do not."""
        rounds, proposed = self.rounds, self.proposed_drafts
        if not rounds or proposed is None or not self.is_chain:
            return None
        is_full = proposed >= _SHARE_OF_DRAFTS * rounds * len(self.rates)
        return None if is_full else max(proposed / rounds, 1.0)

    @property
    def full(self) -> FullRounds | None:
        """Acceptance of the rounds that proposed every draft; None where all of them did."""
        if self.mean_drafts is None:
            return None
        if self.reached:
            defined = takewhile(lambda rate: rate == rate, self.conditional)
            rates = tuple(accumulate(defined, mul))
            return FullRounds(rates, 1 + sum(rates), 1 + sum(rates))
        return full_rounds(self.rates, self.mean_drafts)

    @property
    def reached(self) -> tuple[int, ...]:
        """Rounds that proposed each draft behind accepted ones; () where the tool does not tell."""
        total = self.total
        return () if total is None else total.reached or (total.default_reached if self.mean_drafts is None else ())

    @property
    def conditional(self) -> tuple[float, ...]:
        """Share of the proposed drafts behind accepted ones that were accepted, by position; nan without any."""
        if self.total is not None and self.reached:
            counts = zip(self.total.by_position, self.reached, strict=True)
            return tuple(_ratio(count, reaching) for count, reaching in counts)
        rates = self.rates if self.full is None else self.full.rates
        before = (1.0, *rates[:-1])
        conditional = tuple(_ratio(rate, reaching) for rate, reaching in zip(rates, before, strict=False))
        return conditional + (float("nan"),) * (len(self.rates) - len(rates))

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write; figures that follow from others are included."""
        total = self.total or Counts(0, 0)
        reached = self.reached
        rows = [
            {
                "position": index + 1,
                "unconditional": rate,
                "conditional": conditional,
                "accepted": total.by_position[index] if total.by_position else None,
                "reached": reached[index] if reached else None,
            }
            for index, (rate, conditional) in enumerate(zip(self.rates, self.conditional, strict=True))
        ]
        interval = self.interval
        value = {
            "source": self.source,
            "tool": self.tool,
            "convention": self.convention,
            "pair": self.pair,
            "prompts": self.prompts,
            "temperature": self.temperature,
            "setting": {name: getattr(self, name) for name in ("topk", "num_steps", "num_draft_tokens")},
            "rounds": self.rounds,
            "undrafted_rounds": None if self.total is None else self.total.undrafted,
            "accept_length": self.accept_length,
            "reported_length": self.reported_length,
            "reported_rounding": self.reported_rounding,
            "proposed_drafts": self.proposed_drafts,
            "interval": interval and {name: getattr(interval, name) for name in Interval.__dataclass_fields__},
            "positions": rows,
            "is_by_request": self.is_by_request,
            "counts": [
                {name: getattr(request, name) for name in Counts.__dataclass_fields__} for request in self.counts
            ],
            "shares": self.shares,
        }
        return without_nan(value)

    def _repr_html_(self) -> str:
        """Render the figures for a notebook, a row per draft position."""
        band = "" if self.interval is None else f" ({self.interval.low:.2f} to {self.interval.high:.2f})"
        named = " · ".join(part for part in (self.pair, self.tool, self.source) if part)
        caption = f"{escape(named)}: {self.accept_length:.2f} tokens a round{band}"
        rows = enumerate(zip(self.rates, self.conditional, strict=True), start=1)
        cells = "".join(
            f"<tr><td>{position}</td><td>{rate:.3f}</td><td>{after:.3f}</td></tr>" for position, (rate, after) in rows
        )
        heads = "<tr><th>draft</th><th>unconditional</th><th>conditional</th></tr>"
        return f"<table><caption>{caption}</caption>{heads if cells else ''}{cells}</table>"


def _tails(histogram: Sequence[int]) -> tuple[int, ...]:
    """Sum the entries from 1, 2, ... to the last one."""
    return tuple(accumulate(reversed(histogram[1:])))[::-1]


def _at_least(values: Sequence[int], most: int) -> tuple[int, ...]:
    """Count the values of at least 1, 2, ..., most."""
    histogram = [0] * (most + 1)
    for value in values:
        histogram[min(value, most)] += 1
    return _tails(histogram)


def _sums(rows: Sequence[tuple[int, ...]], length: int) -> tuple[int, ...]:
    totals = [0] * length
    for row in rows:
        for index, value in enumerate(row):
            totals[index] += value
    return tuple(totals)


def _ratio(part: float, total: float) -> float:
    return part / total if total else float("nan")
