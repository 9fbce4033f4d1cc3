"""A policy that measures: most tokens a second in recent batches of about the same size."""

from collections.abc import Sequence

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import require_int, require_number


class Throughput:
    """The setting with most tokens a second in recent batches of about this size (to a factor of 2).

    Every `explore`-th round of a size tries its settings in turn; untried settings come first.
    """

    def __init__(self, settings: Sequence[SpecConfig], weight: float = 0.1, explore: int = 20) -> None:
        require_number("weight", weight, 0, 1, "a number from 0 to 1")
        self._num_settings = len(settings)
        self._weight = weight
        self._explore = require_int("explore", explore, 2, 2**31 - 1)
        self._rates: dict[int, np.ndarray] = {}
        self._rounds: dict[int, int] = {}

    def choose(self, contexts: np.ndarray) -> int:
        size = len(contexts).bit_length()
        num_rounds = self._rounds.get(size, 0)
        if num_rounds < self._num_settings:
            return num_rounds
        if num_rounds % self._explore == 0:
            return num_rounds // self._explore % self._num_settings
        return int(np.nan_to_num(self._rates[size], nan=-1.0).argmax())

    def observe(self, setting: int, accepted: np.ndarray, seconds: float) -> None:
        size = len(accepted).bit_length()
        rates = self._rates.setdefault(size, np.full(self._num_settings, np.nan))
        rate = (len(accepted) + float(accepted.sum())) / seconds
        has_rate = not np.isnan(rates[setting])
        rates[setting] = rates[setting] + self._weight * (rate - rates[setting]) if has_rate else rate
        self._rounds[size] = self._rounds.get(size, 0) + 1
