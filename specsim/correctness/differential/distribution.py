"""Choices checked against logits: the distribution in float64 and the error of float32 arithmetic."""

import math
from dataclasses import dataclass, replace

import torch

from specsim.core.phases import Sampling
from specsim.correctness.differential.budget import FLOAT32_EPS
from specsim.correctness.differential.comparison import Mismatch, WithinRoundingError


@dataclass(frozen=True, slots=True)
class RowDistribution:
    """The distribution of one row of logits."""

    adjusted_V: torch.Tensor  # f64, logits after penalties and bias
    sampling: Sampling  # of one request
    noise: float  # bound on the error of each logit
    is_known: bool = False  # the logits are exact and nothing was added, so float32 keeps their order and ties

    @classmethod
    def of_own_logits(cls, logits_V: torch.Tensor, adjusted_V: torch.Tensor, sampling: Sampling) -> "RowDistribution":
        """Make the distribution that an implementation has to follow, given its own logits."""
        return cls(adjusted_V, sampling, rounding(adjusted_V), torch.equal(logits_V.double(), adjusted_V))

    @property
    def temperature(self) -> float:
        return float(self.sampling.temperature)

    @property
    def slack(self) -> float:
        """Bound the error of a sum of probabilities.

        An error of e in the logits changes a probability by at most a factor of exp(2e / T); float32 rounds the sum.
        """
        return 2 * self.noise / self.temperature + 16 * FLOAT32_EPS

    def prob(self, **changes: float) -> torch.Tensor:
        """Compute the probabilities, f64 [V]; changes: parameters of the sampling."""
        from specsim.reference.sampling import target_prob

        parameters = {name: torch.full_like(getattr(self.sampling, name), value) for name, value in changes.items()}
        return target_prob(self.adjusted_V, replace(self.sampling, **parameters), 0)

    def logprob(self, token: int) -> float:
        from specsim.reference.sampling import logprob

        return logprob(self.adjusted_V, self.sampling, 0, token)

    def logprob_slack(self, noise: float) -> float:
        """Bound the error of a logprob whose logits are off by at most `noise`; float32 rounds it too."""
        return 2 * noise / (self.temperature or 1.0) + 16 * FLOAT32_EPS * max(1.0, math.log(len(self.adjusted_V)))

    def compare_argmax(self, name: str, token: int, node: int) -> None:
        """Require the first of the largest logits, or one that rounding may have made the largest."""
        largest = int((self.adjusted_V == self.adjusted_V.max()).nonzero()[0])
        margin = float(self.adjusted_V[largest] - self.adjusted_V[token])
        if token != largest and (self.is_known or not margin <= 2 * self.noise):
            raise Mismatch(name, largest, token, node)

    def compare_draw(self, name: str, weight_V: torch.Tensor, uniform: float, token: int, node: int | None) -> None:
        """Require an inverse-CDF draw: the uniform lies in the token's share of the mass, or within the slack of it."""
        cdf_V = weight_V.cumsum(-1)
        at = uniform * float(cdf_V[-1])
        low = float(cdf_V[token] - weight_V[token])
        high = float(cdf_V[token])
        if not (weight_V[token] > 0 and low - self.slack <= at <= high + self.slack):
            self.deny(name, int((cdf_V > at).nonzero()[0]), token, node)

    def deny(self, name: str, expected: object, actual: object, node: int | None) -> None:
        """Reject a choice that does not follow, unless rounding may have moved the edge of a filter."""
        if self.is_fragile():
            raise WithinRoundingError
        raise Mismatch(name, expected, actual, node)

    def is_fragile(self) -> bool:
        """Whether rounding decides if a token near a filter's edge is kept."""
        top_p = float(self.sampling.top_p)
        min_p = float(self.sampling.min_p)
        return (
            self._top_k_is_fragile(int(self.sampling.top_k))
            or (top_p < 1 and self._top_p_is_fragile(top_p))
            or (min_p > 0 and self._min_p_is_fragile(min_p))
        )

    def _top_k_is_fragile(self, top_k: int) -> bool:
        if not 0 < top_k < len(self.adjusted_V):
            return False
        last, next_one = self.adjusted_V.sort(descending=True).values[top_k - 1 : top_k + 1].tolist()
        return last - next_one <= 2 * self.noise and not (self.is_known and last == next_one)

    def _top_p_is_fragile(self, top_p: float) -> bool:
        ordered = self.prob(top_p=1.0, min_p=0.0).sort(descending=True).values
        return bool((ordered.cumsum(-1) - ordered - top_p).abs().min() <= self.slack)

    def _min_p_is_fragile(self, min_p: float) -> bool:
        prob_V = self.prob(min_p=0.0)
        return bool(((prob_V / prob_V.max() / min_p - 1).abs() <= self.slack).any())


def rounding(adjusted_V: torch.Tensor) -> float:
    """Bound the error of float32 arithmetic on exactly known logits."""
    finite = adjusted_V[adjusted_V.isfinite()]
    return 16 * FLOAT32_EPS * float(finite.abs().max()) if len(finite) else 0.0
