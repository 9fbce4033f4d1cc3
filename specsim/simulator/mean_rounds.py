"""Mean rounds until a request has a number of tokens."""

from functools import lru_cache

import numpy as np

from specsim.simulator.option import Option


@lru_cache(maxsize=256)
def mean_rounds(option: Option, tokens: int) -> float:
    """Compute the mean rounds until a request has this many tokens; surplus tokens of the last round are dropped."""
    rates = option.rates
    exactly = -np.diff([1.0, *rates, 0.0])  # share of rounds that accept 0, 1, ... drafts
    rounds = np.zeros(tokens + 1)
    for known in range(1, tokens + 1):
        before = np.maximum(known - 1 - np.arange(len(exactly)), 0)
        rounds[known] = 1 + exactly @ rounds[before]
    return float(rounds[tokens])
