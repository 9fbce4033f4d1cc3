"""Checks of the numbers in a description: InputError for numbers out of bounds and for other values."""

import math
import sys
from typing import TypeGuard

import numpy as np

from specsim.core.errors import InputError, require, require_int
from specsim.core.limits import MOST_WIDTH

LARGEST_COUNT = 2**31 - 1


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value is an integer or a float that a finite float holds; True and False are not."""
    plain = value.item() if isinstance(value, np.generic) else value
    return isinstance(plain, (int, float)) and not isinstance(plain, bool) and abs(plain) <= sys.float_info.max


def number(name: str, value: object, least: float = 0, most: float = math.inf) -> float:
    """Check a number from `least` to `most`; returns a float."""
    if is_number(value) and least <= value <= most:
        return float(value)
    allowed = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
    raise InputError(name, value, f"a number {allowed}")


def probability(name: str, value: object) -> float:
    """Check a number from 0 to 1; returns a float."""
    return number(name, value, 0, 1)


def positive(name: str, value: object) -> float:
    """Check a number above 0; returns a float."""
    if is_number(value) and value > 0:
        return float(value)
    raise InputError(name, value, "a number above 0")


def share(name: str, value: object) -> float:
    """Check a number above 0 and at most 1; returns a float."""
    if is_number(value) and 0 < value <= 1:
        return float(value)
    raise InputError(name, value, "a number above 0 and at most 1")


def integer(name: str, value: object, least: int = 1) -> int:
    """Check an integer of at least `least`."""
    return require_int(name, value, least)


def model_size(name: str, value: object, least: int = 1, most: int = MOST_WIDTH) -> int:
    """Check a size of a model, an integer from `least` to the most of any model."""
    return require_int(name, value, least, most)


def flag(name: str, value: object) -> bool:
    """Check True or False."""
    require(isinstance(value, bool), name, value, "true or false")
    return bool(value)


def count(name: str, value: object, least: int = 1) -> int:
    """Check an integer from `least` to 2^31 - 1."""
    return require_int(name, value, least, LARGEST_COUNT)


def lengths(name: str, values: object) -> np.ndarray:
    """Check numbers of tokens, finite and of at least 0, one per request: [B]."""
    array = np.asarray(values)
    if array.ndim != 1 or (len(array) and not _are_counts(array)):
        raise InputError(name, values, "finite numbers of at least 0, one a request")
    return array


def _are_counts(array: np.ndarray) -> bool:
    is_number = array.dtype.kind in "iuf"
    return is_number and bool(np.minimum.reduce(array) >= 0 and np.maximum.reduce(array) < np.inf)
