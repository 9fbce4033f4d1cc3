"""Probabilities of acceptance by depth and rank: published ones, and those that follow from a record."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from operator import mul

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.display import short_setting
from specsim.core.errors import InputError, require
from specsim.simulator.acceptance import PerPosition, accept_length, iid_of_length
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts, Interval
from specsim.simulator.continuation import continued, length_interval
from specsim.simulator.rank_by_depth import Shares, chain_shares, rank_by_depth
from specsim.simulator.varying_drafts import FullRounds

DEPTH = 8  # depths of the shares; those beyond the published ones follow the smoothed rule of continuations
# Share of rounds in which the right token is among the 1, 2, ... best guesses of Medusa's first head, Vicuna-7B.
_AMONG_BEST = (0.56, 0.672, 0.727, 0.76, 0.78)
RANKS_SOURCE = "Medusa, arXiv 2401.10774"


@dataclass(frozen=True, slots=True)
class PublishedAcceptance:
    """Published unconditional rates of a chain's positions."""

    pair: str
    rates: tuple[float, ...]  # share of the rounds that accept at least 1, 2, ... drafts
    source: str

    @property
    def conditional(self) -> tuple[float, ...]:
        """Compute the probability of the best draft after d accepted ones, for each of DEPTH depths."""
        return tuple(rate / before for before, rate in pairwise((1.0, *continued(self.rates, DEPTH))))

    @property
    def shares(self) -> tuple[tuple[float, ...], ...]:
        """Compute the probability of acceptance by depth and rank.

        The second, third, ... best draft takes the share of the remaining probability that Medusa's second, third, ...
        guess takes. With these ranks a chain of 5 of accept length 3.0 becomes a tree of 25 drafts of 3.62, both as
        published for EAGLE and Llama-2-7B (https://github.com/SafeAILab/EAGLE/issues/132).
        """
        return tuple(ranks(best) for best in self.conditional)


_MT_BENCH = "vllm#32030, MT-Bench, T = 0"
_PUBLISHED = {
    ("eagle3", "llama-3.1-8b"): PublishedAcceptance("Llama-3.1-8B with EAGLE-3", (0.73, 0.52, 0.35), _MT_BENCH),
    ("eagle3", "qwen3-8b"): PublishedAcceptance("Qwen3-8B with EAGLE-3", (0.65, 0.40, 0.20), _MT_BENCH),
    ("eagle3", "gpt-oss-20b"): PublishedAcceptance("gpt-oss-20b with EAGLE-3", (0.72, 0.51, 0.32), _MT_BENCH),
    # Accept lengths 2.10, 2.29, 2.39 and 2.43 of 2 to 5 drafts; the first two drafts are assumed to be equal.
    ("eagle", "llama-3.1-8b"): PublishedAcceptance(
        "Llama-3.1-8B with EAGLE-1", (0.662, 0.438, 0.19, 0.10, 0.04), "vllm#20780"
    ),
    ("mtp", ""): PublishedAcceptance(
        "a target with MTP modules",
        (0.7617, 0.6158, 0.5125, 0.4243, 0.364, 0.3094, 0.2722, 0.2365),
        "vllm#48892, GSM8K, T = 0",
    ),
}
DEFAULT = _PUBLISHED["eagle3", "llama-3.1-8b"]


def published_acceptance(drafter: str, model: str) -> PublishedAcceptance:
    """Look up the figures of this pair, else those of the first pair with this drafter, else DEFAULT."""
    same_drafter = (published for (kind, _), published in _PUBLISHED.items() if kind == drafter)
    return _PUBLISHED.get((drafter, model)) or next(same_drafter, DEFAULT)


def ranks(best: float) -> tuple[float, ...]:
    """Split a probability into the shares of the best draft and those after it."""
    missed = [1 - among for among in _AMONG_BEST]
    remaining = [after / missed[0] * (1 - best) for after in missed]
    return (best, *(before - after for before, after in pairwise(remaining)))


LEAST_RATE = 0.01  # rates below it end the continuation: what follows changes no accept length


@dataclass(frozen=True, slots=True)
class RecordShares:
    """Probabilities of acceptance for plans, with the assumptions behind them."""

    shares: Shares  # by depth and rank
    assumed: tuple[str, ...]  # what the record does not say, a clause for each
    num_measured: int  # depths that were measured


def record_shares(record: AcceptanceRecord, depth: int = DEPTH) -> RecordShares:
    """Derive the probabilities of a record; depths beyond the measured ones follow the smoothed rule.

    InputError for a record of an accept length alone whose number of steps is unknown.
    """
    if record.shares:
        return RecordShares(record.shares, (), len(record.shares))
    steps = record.num_steps
    allowed = "a record with rates by position, or with num_steps, which the accept length alone does not give"
    require(steps, "acceptance", record.source, allowed)
    assert steps is not None
    if not record.is_chain:
        return _of_tree(record, max(depth, steps))
    rates = record.rates
    assumed = ["nothing is known of second-best drafts, which trees need"]
    if not rates:
        rates = tuple(iid_of_length(record.accept_length, steps).rates().tolist())
        assumed.append("one conditional rate for all depths, as only the accept length is known")
    elif record.full is not None:
        rates = record.full.rates
        assumed.append(_varying(record, record.full))
    elif record.total is not None and record.total.reached:
        rates = _proposed(record.conditional)
        if not np.allclose(rates, record.rates[: len(rates)]):
            assumed.append("rounds that proposed fewer drafts count only where they proposed")
    if depth > len(rates):
        assumed.append(further(rates, depth))
    return RecordShares(chain_shares(continued(rates, max(depth, steps))), tuple(assumed), len(rates))


def _varying(record: AcceptanceRecord, full: FullRounds) -> str:
    """Say what is assumed of rounds that propose every draft."""
    clause = (
        f"rounds proposed {record.mean_drafts:.2f} of {len(record.rates)} drafts on average, and how many does not "
        f"depend on the text: accept length {1 + sum(full.rates):.2f} with all of them"
    )
    if full.low == full.high:
        return clause
    return f"{clause} ({full.low:.2f} to {full.high:.2f}; metrics of each request tell it exactly)"


def further(rates: Sequence[float], depth: int) -> str:
    """Say what is assumed of depths beyond the given rates, with the interval of the accept length there."""
    values = tuple(rates)
    last = depth
    extended = continued(values, depth)
    while last > len(values) + 1 and extended[last - 1] < LEAST_RATE:
        last -= 1
    band = length_interval(values, last)
    length = 1 + sum(extended[:last])
    return (
        f"depths beyond {len(values)} follow a line in logits of the conditional rates: accept length {length:.2f} at "
        f"{last} steps ({band.low:.2f} to {band.high:.2f}, {band.confidence:.0%} by {band.method})"
    )


def setting_acceptance(record: AcceptanceRecord, config: SpecConfig) -> PerPosition:
    """Give the acceptance of a setting: as measured if it is the record's own, else from its probabilities."""
    if _is_measured(record, config):
        total = record.total or Counts(0, 0)
        drafted = total.rounds / (total.rounds + total.undrafted) if total.undrafted else 1.0
        return PerPosition(tuple(rate * drafted for rate in record.rates))
    derived = record_shares(record, config.num_steps)
    allowed = "1: the record says nothing of second-best drafts"
    require(len(derived.shares[0]) >= config.topk, "topk", config.topk, allowed)
    return rank_by_depth(derived.shares[: config.num_steps], config)


def setting_source(record: AcceptanceRecord, config: SpecConfig) -> str:
    """Say how the acceptance of a setting follows from a record, in a sentence."""
    length = accept_length(setting_acceptance(record, config))
    band = predicted_interval(record, config)
    drafts = f"{record.num_steps} steps" if record.mean_drafts is None else f"{record.mean_drafts:.2f} drafts a round"
    origin = "as measured" if _is_measured(record, config) else f"from {record.accept_length:.2f} at {drafts}"
    if record.total is not None and record.total.undrafted and _is_measured(record, config):
        origin += f" over all rounds, {record.total.undrafted:,} of them without drafts"
    interval = "" if band is None else f" ({band.low:.2f} to {band.high:.2f}, {band.confidence:.0%} by {band.method})"
    return f"Accept length {length:.2f}{interval}, {origin}: {record.source} ({record.tool})."


def _is_measured(record: AcceptanceRecord, config: SpecConfig) -> bool:
    """Check whether a setting is the one that was measured in every round, by position."""
    measured_config = record.config
    same = ("topk", "num_steps", "num_draft_tokens")
    return (
        bool(record.rates)
        and record.mean_drafts is None
        and measured_config is not None
        and all(getattr(measured_config, name) == getattr(config, name) for name in same)
    )


def predicted_interval(record: AcceptanceRecord, config: SpecConfig) -> Interval | None:
    """Compute the interval of a longer chain's accept length; None for other settings."""
    if config.topk > 1 or not record.is_chain or not record.rates or config.num_steps <= len(record.rates):
        return None
    return length_interval(record.rates if record.full is None else record.full.rates, config.num_steps)


def _proposed(conditional: Sequence[float]) -> tuple[float, ...]:
    """Compute the rates of rounds that propose every draft from conditional ones, up to the first without any."""
    defined = list(takewhile(lambda rate: rate == rate, conditional))
    return tuple(accumulate(defined, mul))


def _of_tree(record: AcceptanceRecord, depth: int) -> RecordShares:
    """Find the probability of the best draft, the same at all depths, that gives a tree's accept length."""
    config = record.config
    if config is None:
        allowed = (
            "a record of a tree with topk, num_steps and num_draft_tokens (of SGLang's responses: with the answer of "
            "/get_server_info as another line of the file)"
        )
        raise InputError("acceptance", record.source, allowed)

    def missing(best: float) -> float:
        return accept_length(rank_by_depth([ranks(best)] * config.num_steps, config)) - record.accept_length

    equal = 1 / (1 + len(ranks(0.0)))  # a best draft that is hardly better than the second one
    low, high = missing(equal) + record.accept_length, missing(1.0) + record.accept_length
    if not low <= record.accept_length <= high:
        raise InputError("accept_length", record.accept_length, f"{low:.2f} to {high:.2f} for {short_setting(config)}")
    from scipy.optimize import brentq  # slow to load

    best = float(brentq(missing, equal, 1.0, xtol=1e-9))  # pyright: ignore[reportArgumentType]
    assumed = (
        "one probability of the best draft for all depths, which gives the tree's accept length",
        f"second-best drafts as in {RANKS_SOURCE}",
    )
    return RecordShares((ranks(best),) * depth, assumed, config.num_steps)
