"""Randomness of the simulator: uniforms by name, not by order, so that a request always sees the same ones."""

from enum import IntEnum

import numpy as np

from specsim.core.errors import require_int

_STEP = 0x9E3779B97F4A7C15
_WORD = 2**64 - 1
_STRIDE = np.uint64(_STEP)
_ONE = np.uint64(1)
_UNIT = 2.0**-53
_LOST_BITS = np.uint64(11)


class UniformStream(IntEnum):
    """Purpose of a uniform. Two streams share no name."""

    ROUND = 0
    PHASE = 1
    PART = 2
    LENGTH = 3


def mix(words: np.ndarray) -> np.ndarray:
    """Mix by the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), a bijection of uint64 words."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def keys(seed: int, stream: UniformStream, request_ids: np.ndarray) -> np.ndarray:
    """Make names of requests' uniforms of one stream, uint64; keep them where a request draws many."""
    require_int("seed", seed, 0, _WORD)
    start = mix(np.array([(seed + (stream + 1) * _STEP) & _WORD], dtype=np.uint64))
    return mix(start + np.asarray(request_ids).astype(np.uint64) * _STRIDE)


def named_uniforms(keys: np.ndarray, indices: np.ndarray | int) -> np.ndarray:
    """Compute uniforms in [0, 1), float64, of the broadcast shape of keys and indices (integers of at least 0)."""
    words = mix(keys + (np.atleast_1d(indices).astype(np.uint64) + _ONE) * _STRIDE)
    return (words >> _LOST_BITS) * _UNIT
