"""Inverse problem: cost of verify and draft from published accept lengths and times per token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from specsim.core.errors import InputError, require
from specsim.simulator.bounds import positive
from specsim.simulator.calibrate import CONFIDENCE
from specsim.simulator.model import Model, expected_experts


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval."""

    value: float
    low: float  # -inf and inf where there are as many unknowns as figures
    high: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """Seconds of a round, recovered from published figures."""

    fixed: Interval  # verification, the first draft and the host
    draft: Interval  # each further draft, with its share of verification: num_drafts cannot separate the two
    worst: float  # largest relative difference between a published time per token and the recovered one

    def speedup(self, num_drafts: int, accept_length: float, plain: float) -> float:
        """Compute the speed-up over plain decoding at `plain` seconds per token."""
        return accept_length * plain / (self.fixed.value + num_drafts * self.draft.value)


def recover(num_drafts: Sequence[int], accept_lengths: Sequence[float], tpot: Sequence[float]) -> Recovered:
    """Solve accept length · seconds per token = fixed + draft · num_drafts.

    Least squares of relative errors. InputError for fewer than two different num_drafts, a non-positive time, and an
    accept length outside 1 to num_drafts + 1.
    """
    drafts, lengths, times = (np.asarray(each, float) for each in (num_drafts, accept_lengths, tpot))
    require(len(set(drafts)) >= 2, "num_drafts", list(num_drafts), "at least two different numbers")
    for count, length, seconds in zip(drafts, lengths, times, strict=True):
        positive("tpot", float(seconds))
        if not 1 <= length <= count + 1:
            raise InputError("accept_length", float(length), f"1 to {count + 1:g}, the drafts of a round and the bonus")
    rounds = lengths * times
    scaled = np.stack([1 / rounds, drafts / rounds], axis=1)
    solution, *_ = np.linalg.lstsq(scaled, np.ones(len(rounds)), rcond=None)
    residuals = scaled @ solution - 1
    fixed, draft = (Interval(*each) for each in zip(solution, *_interval(scaled, residuals, solution), strict=True))
    return Recovered(fixed, draft, float(np.abs(residuals).max()))


def least_bandwidth(model: Model, rows: tuple[int, int], seconds: tuple[float, float]) -> float:
    """Estimate the bytes/s that a GPU reads, if a forward's growth with rows were all reading of experts.

    rows, seconds: of two forwards, (fewer, more). Uniform routing; routing that favours some experts touches fewer of
    them and needs less. InputError for a model without experts, and for a second forward that is not larger and slower.
    """
    few, many = rows
    shorter, longer = seconds
    if not any(group.experts for group in model.layers):
        raise InputError("model", model.name, "a model of experts: others read the same weights for any rows")
    if not (0 < few < many and 0 < shorter < longer):
        raise InputError("seconds", seconds, f"two rising times above 0, of {few} and of more rows")
    nbytes = 0.0
    for group in model.layers:
        if group.experts:
            before = float(expected_experts(group.experts, group.experts_per_token, few))
            after = float(expected_experts(group.experts, group.experts_per_token, many))
            nbytes += group.count * (after - before) * group.expert_weights * model.expert_format.bytes
    return nbytes / (longer - shorter)


def _interval(scaled: np.ndarray, residuals: np.ndarray, solution: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    freedom = len(residuals) - len(solution)
    if freedom < 1:
        return np.full(len(solution), -np.inf), np.full(len(solution), np.inf)
    variance = (residuals @ residuals) / freedom * np.linalg.inv(scaled.T @ scaled).diagonal()
    half = student.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(variance)
    return solution - half, solution + half
