"""Metrics of a run from its counters, and conversions from other tools' metrics.

`draft` in a name counts drafts only; `accept` without `draft` includes the bonus token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require
from specsim.core.limits import NonNegativeNumber, StepCount

LOOP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance statistics over rounds; nan without a round."""

    rounds: int  # (request, round) pairs with drafts; all of plain decoding's
    accept_length: float  # mean tokens of a round, bonus included, in [1, S+1]
    accept_rate: float  # accepted drafts over proposed depths: num_steps, or less where a drafter proposed less
    node_rate: float  # accepted drafts over the num_draft_tokens - 1 of each round; of a full chain the accept rate
    accepted_by_position: tuple[float, ...]  # [S], share of rounds that accepted at least i drafts (unconditional)
    undrafted_rounds: int = 0  # rounds without drafts, which only the node rate counts

    @property
    def conditional_by_position(self) -> tuple[float, ...]:
        """Share of the rounds with i-1 accepted drafts that also accepted the i-th, nan without such rounds."""
        reached = (1.0, *self.accepted_by_position[:-1])
        return tuple(
            now / before if before else float("nan")
            for now, before in zip(self.accepted_by_position, reached, strict=True)
        )

    def _repr_html_(self) -> str:
        from specsim.core.display import acceptance_html

        return acceptance_html(self)


@check_arguments
def acceptance(
    num_accepted_drafts: Sequence[int],
    num_steps: StepCount,
    num_draft_tokens: NonNegativeNumber,
    proposed_depths: Sequence[int] | None = None,
) -> Acceptance:
    """Compute the acceptance of rounds from the number of drafts that each accepted.

    num_draft_tokens: of a round, the mean where rounds differ. proposed_depths: depth of each round's deepest draft,
    0 for a round without drafts, as vLLM's counters leave them out; None: num_steps in all rounds. Raises InputError
    for counts that are not integers from 0 to num_steps.
    """
    drafts = np.asarray(num_accepted_drafts)
    if drafts.size and not 0 <= drafts.min() <= drafts.max() <= num_steps:
        extent = f"{drafts.min()} to {drafts.max()}"
        raise InputError("num_accepted_drafts", extent, f"integers from 0 to num_steps, {num_steps}")
    nan = float("nan")
    num_proposed = (num_draft_tokens - 1) * drafts.size
    accepted = int(drafts.sum())
    depths = np.full(drafts.size, num_steps) if proposed_depths is None else np.asarray(proposed_depths)
    undrafted = int((depths == 0).sum()) if num_steps else 0
    drafts = drafts[depths > 0] if undrafted else drafts
    depth = int(depths.sum())
    mean = float(drafts.mean()) if drafts.size else nan
    by_position = tuple(
        float((drafts >= position).mean()) if drafts.size else nan for position in range(1, num_steps + 1)
    )
    return Acceptance(
        rounds=int(drafts.size),
        accept_length=mean + 1,
        accept_rate=accepted / depth if depth else nan,
        node_rate=accepted / num_proposed if num_proposed else nan,
        accepted_by_position=by_position,
        undrafted_rounds=undrafted,
    )


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of one request, in scheduler steps and in seconds.

    Undefined values are nan. The tokens of a round arrive together, so itl >= tpot. vLLM's benchmark counts both the
    same way, and then pools the gaps of all requests. Time spent waiting after a preemption is included.
    """

    ttft_steps: float  # arrival to first delivery, both steps included: 1 where they are the same
    # time from arrival to the first delivery, in seconds
    ttft_seconds: float
    tpot_steps: float  # (last - first delivery) / (tokens - 1), nan below two tokens
    # time per output token after the first delivery, in seconds
    tpot_seconds: float
    itl_steps: float  # mean gap between successive deliveries, nan below two of them
    # mean time between deliveries, in seconds
    itl_seconds: float
    e2e_steps: float  # arrival to last delivery, both steps included
    # time from arrival to the last delivery, in seconds
    e2e_seconds: float


@check_arguments
def latency(arrived: tuple[int, float] | None, emissions: Sequence[tuple[int, float, int]]) -> Latency:
    """Compute the latency of a request from its arrival (step, seconds) and its deliveries (step, seconds, tokens).

    arrived is None for a request that never arrived. Raises InputError for deliveries without tokens or out of order.
    """
    nan = float("nan")
    if arrived is None or not emissions:
        return Latency(*[nan] * 8)
    times = [tuple(arrived), *((step, seconds) for step, seconds, _ in emissions)]
    in_order = all(before[axis] <= after[axis] for before, after in pairwise(times) for axis in (0, 1))
    has_tokens = min(tokens for *_, tokens in emissions) >= 1
    require(in_order and has_tokens, "emissions", emissions, "deliveries after the arrival, in order, each with tokens")
    (first_step, first_seconds) = times[1]
    (last_step, last_seconds) = times[-1]
    steps = last_step - first_step
    seconds = last_seconds - first_seconds
    more_tokens = sum(tokens for *_, tokens in emissions) - 1 or nan
    gaps = len(emissions) - 1 or nan
    return Latency(
        ttft_steps=float(first_step - arrived[0] + 1),
        ttft_seconds=float(first_seconds - arrived[1]),
        tpot_steps=steps / more_tokens,
        tpot_seconds=seconds / more_tokens,
        itl_steps=steps / gaps,
        itl_seconds=seconds / gaps,
        e2e_steps=float(last_step - arrived[0] + 1),
        e2e_seconds=float(last_seconds - arrived[1]),
    )


def distinct_share(token_ids: Sequence[int], order: int = 4) -> float:
    """Compute the share of distinct sequences of n tokens, 1 for a text shorter than n.

    It is near 1 for fresh text and near 0 for a loop.
    """
    grams = [tuple(token_ids[start : start + order]) for start in range(len(token_ids) - order + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_loop(token_ids: Sequence[int]) -> bool:
    """Check whether a text repeats itself, with fewer than half of its 4-grams distinct.

    Loops inflate acceptance.
    """
    return distinct_share(token_ids) < LOOP_SHARE


def accept_length_from_tensorrt_llm(accepted_drafts_per_round: float) -> float:
    """Convert TensorRT-LLM's acceptance length, which counts drafts only, to accept length."""
    return accepted_drafts_per_round + 1


def accept_length_from_eagle_tau(tau: float, rounds: int) -> float:
    """Convert EAGLE's printed tau, the same tokens over rounds - 1, to accept length."""
    return tau * (rounds - 1) / rounds


def accept_length_from_rate(accept_rate: float, num_steps: int) -> float:
    """Convert vLLM's draft acceptance rate (accepted over proposed drafts) to accept length."""
    return 1 + num_steps * accept_rate
