"""Arrival times of an open loop: gamma gaps, and a rate that rises and falls over a day."""

from dataclasses import dataclass

import numpy as np

from specsim.simulator.bounds import number, positive

DAY = 86400.0  # seconds
_HALVINGS = 64


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Shape of an arrival process, whatever its mean rate; the default is Poisson."""

    burstiness: float = 1.0  # shape of the gamma distribution of gaps, as in vLLM's benchmark: below 1 is bursty
    swing: float = 0.0  # amplitude of the rate over a period, relative to its mean, 0 to 1
    period: float = DAY  # seconds

    def __post_init__(self) -> None:
        for name in ("burstiness", "period"):
            positive(name, getattr(self, name))
        number("swing", self.swing, 0, 1)

    def at_unit_rate(self, uniforms: np.ndarray) -> np.ndarray:
        """Compute times f64 [R] at a mean rate of one a second, without the swing, from uniforms in [0, 1)."""

        from scipy.special import gammaincinv  # slow to load

        if self.burstiness == 1:
            return np.cumsum(-np.log1p(-uniforms))
        return np.cumsum(gammaincinv(self.burstiness, uniforms) / self.burstiness)

    def swung(self, seconds: np.ndarray) -> np.ndarray:
        """Move times of a constant rate so that it is 1 + swing · sin(2π t / period) times as large.

        Time t has the expected number of arrivals of t + swing · period / 2π · (1 - cos(2π t / period)) seconds, which
        bisection inverts.
        """
        if not self.swing:
            return seconds
        turn = 2 * np.pi / self.period
        low = np.maximum(seconds - 2 * self.swing / turn, 0.0)
        high = seconds.copy()
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            is_late = middle + self.swing / turn * (1 - np.cos(turn * middle)) >= seconds
            high = np.where(is_late, middle, high)
            low = np.where(is_late, low, middle)
        return high
