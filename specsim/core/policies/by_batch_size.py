"""Policies that follow the batch size alone: an off-switch, and vLLM's table."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import require, require_int
from specsim.core.policies.policy import number_of

LARGEST = 2**31 - 1


class OffSwitch:
    """Speculation with setting `on` in batches of at most `limit` requests, setting `off` in larger ones."""

    def __init__(self, limit: int, on: int = 1, off: int = 0) -> None:
        self._limit = require_int("limit", limit, 0, LARGEST)
        self._on = on
        self._off = off

    def choose(self, contexts: np.ndarray) -> int:
        return self._on if len(contexts) <= self._limit else self._off

    def observe(self, setting: int, accepted: np.ndarray, seconds: float) -> None:
        pass


class BatchTable:
    """Numbers of drafts by batch size, as vLLM's num_speculative_tokens_per_batch_size (vllm-project/vllm#32374).

    An entry is (lowest batch size, highest, drafts). A size between two entries, or above the last one, has the drafts
    of the entry before it.
    """

    def __init__(self, settings: Sequence[SpecConfig], entries: Sequence[Sequence[int]]) -> None:
        name = "num_speculative_tokens_per_batch_size"
        require(entries and all(len(entry) == 3 for entry in entries), name, entries, "entries of three integers")
        for entry in entries:
            for value, least in zip(entry, (1, 1, 0), strict=True):
                require_int(name, value, least, LARGEST)
            require(entry[0] <= entry[1], name, list(entry), "entries whose lowest batch size is at most the highest")
        require(entries[0][0] == 1, name, entries[0][0], "a first entry that starts at batch size 1")
        for before, after in pairwise(entries):
            require(before[1] < after[0], name, list(after), "entries in order that do not overlap")
        self._lows = [entry[0] for entry in entries]
        self._choices = [number_of(settings, entry[2]) for entry in entries]

    def choose(self, contexts: np.ndarray) -> int:
        return self._choices[bisect_right(self._lows, max(len(contexts), 1)) - 1]

    def observe(self, setting: int, accepted: np.ndarray, seconds: float) -> None:
        pass
