"""The inverse problem: what verify and draft must have cost, from published accept lengths and times a token."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from specsim.core.errors import InputError
from specsim.simulator.bounds import positive
from specsim.simulator.calibrate import CONFIDENCE
from specsim.simulator.model import Model, expected_experts


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval; infinite where there are as many unknowns as figures."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """Seconds of a round: fixed (verification, the first draft, the host) and for each further draft.

    The cost of verifying one more node is part of the latter: K alone cannot tell them apart. worst: the largest
    relative difference between a published time a token and the recovered one.
    """

    fixed: Interval
    draft: Interval
    worst: float

    def speedup(self, num_drafts: int, accept_length: float, plain: float) -> float:
        """Over plain decoding at `plain` seconds a token."""
        return accept_length * plain / (self.fixed.value + num_drafts * self.draft.value)


def recover(num_drafts: Sequence[int], accept_lengths: Sequence[float], tpot: Sequence[float]) -> Recovered:
    """From rounds of num_drafts drafts: accept length · seconds a token = fixed + draft · num_drafts.

    Least squares of relative errors. InputError for fewer than two different num_drafts, a non-positive time, and an
    accept length outside 1 to num_drafts + 1.
    """
    drafts, lengths, times = (np.asarray(each, float) for each in (num_drafts, accept_lengths, tpot))
    if len(set(drafts)) < 2:
        raise InputError("num_drafts", list(num_drafts), "at least two different numbers")
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
    """Bytes a second that a GPU reads, if a forward's growth from few rows to many were all reading of experts.

    rows, seconds: of two forwards. Uniform routing; routing that favours some experts touches fewer of them and needs
    less. InputError for a model without experts, and for a second forward that is not larger and slower.
    """
    few, many = rows
    if not any(group.experts for group in model.layers):
        raise InputError("model", model.name, "a model of experts: others read the same weights for any rows")
    if not (0 < few < many and 0 < seconds[0] < seconds[1]):
        raise InputError("seconds", seconds, f"two rising times above 0, of {few} and of more rows")
    nbytes = 0.0
    for group in model.layers:
        touched = [expected_experts(group.experts, group.experts_per_token, each) for each in rows if group.experts]
        if touched:
            nbytes += group.count * (touched[1] - touched[0]) * group.expert_weights * model.expert_bytes
    return nbytes / (seconds[1] - seconds[0])


def _interval(scaled: np.ndarray, residuals: np.ndarray, solution: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    freedom = len(residuals) - len(solution)
    if freedom < 1:
        return np.full(len(solution), -np.inf), np.full(len(solution), np.inf)
    variance = (residuals @ residuals) / freedom * np.linalg.inv(scaled.T @ scaled).diagonal()
    half = student.ppf((1 + CONFIDENCE) / 2, freedom) * np.sqrt(variance)
    return solution - half, solution + half
