"""Forwards of an engine's target over one text, in a pool of their own.

The search for a target's first NaN (core.engine) and the scores of a text (serving.scoring) run them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch, PrefillInput

if TYPE_CHECKING:
    from specsim.core.engine import Engine

_ROWS = 512  # of one forward


class TextForward:
    """A text of at most `length` tokens, which may grow from call to call."""

    def __init__(self, engine: "Engine", length: int) -> None:
        self.num_rows = 0  # tokens that have run
        self._engine = engine
        self._pools = engine.make_pools(1, length + engine.config.page_size)
        row = self._pools.open()
        self._pools.reserve(row, length)
        self._batch = Batch.of([0], [row], [length], [SamplingParams()], engine.target.config.vocab_size)

    def extend(self, token_ids: Sequence[int]) -> Iterator[torch.Tensor]:
        """Run further tokens; yield chunks of the hidden states between the target's n layers, [R, n + 1, H]."""
        device, layers = self._engine.device, self._engine.target.config.num_layers
        for first in range(0, len(token_ids), _ROWS):
            chunk = PrefillInput.of_prompts([token_ids[first : first + _ROWS]])
            start, self.num_rows = self.num_rows, self.num_rows + len(chunk.input_ids)
            chunk = replace(chunk, start_lens=torch.tensor([start])).to(device)
            batch = replace(self._batch, seq_lens=torch.tensor([self.num_rows])).to(device)
            hidden_R = self._engine.hidden_states(batch, chunk, self._pools)
            yield hidden_R.unflatten(-1, (layers + 1, -1))
