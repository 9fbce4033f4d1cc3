"""Lengths of prompts and outputs: constant, uniform or lognormal, drawn from uniforms."""

import numpy as np

from specsim.core.errors import InputError
from specsim.simulator.bounds import LARGEST_COUNT, count, positive

Length = int | tuple[int, int] | str  # one for all; bounds of a uniform integer; lognormal:MEAN:CV
LOGNORMAL = "lognormal"


def draw(name: str, length: Length, uniforms: np.ndarray) -> np.ndarray:
    """Draw a length in tokens for each uniform in [0, 1), int64 [R].

    lognormal:MEAN:CV has this mean and this standard deviation over the mean before it is rounded, and at least 1.
    """
    if isinstance(length, str):
        from scipy.special import ndtri  # slow to load

        mean, variation = lognormal(name, length)
        sigma = np.sqrt(np.log1p(variation**2))
        uniforms = np.maximum(uniforms, 2.0**-54)  # the quantile of 0 is minus infinity
        drawn = mean * np.exp(sigma * ndtri(uniforms) - sigma**2 / 2)
        return np.clip(np.rint(drawn), 1, LARGEST_COUNT).astype(np.int64)
    least, most = length if isinstance(length, tuple) and len(length) == 2 else (length, length)
    least = count(name, least)
    return least + np.floor(uniforms * (count(name, most, least) - least + 1)).astype(np.int64)


def lognormal(name: str, text: str) -> tuple[float, float]:
    """Read mean and coefficient of variation of lognormal:MEAN:CV."""
    kind, *numbers = text.split(":")
    try:
        mean, variation = map(float, numbers if kind == LOGNORMAL else ())
        return positive(name, mean), positive(name, variation)
    except ValueError as error:
        allowed = "lognormal:MEAN:CV, the mean in tokens and the standard deviation over it: lognormal:512:0.8"
        raise InputError(name, text, allowed) from error
