"""Forwards of an engine's target over one text, and the search for the target's first NaN.

The log probability of a token is NaN if, and only if, its row of logits holds NaN or +inf or nothing but -inf. It is on
the host in any case. The scores of drafts are not, so that only what reads a round's states checks them. Correctness
and serving use both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from specsim.core.config import SamplingParams
from specsim.core.engine import Engine
from specsim.core.errors import NotFinite
from specsim.core.phases import Batch, PrefillInput
from specsim.core.state import dtype_name

_ROWS = 512  # of one forward


class TextForward:
    """A text of at most `length` tokens, which may grow from call to call."""

    def __init__(self, engine: Engine, length: int) -> None:
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


def target_error(engine: Engine, request_id: int, round_number: int, token_ids: list[int]) -> NotFinite:
    """Make the error for logits with NaN or +inf after a request's tokens, whose forward is run again.

    round_number: from 1; 0 is the prefill.
    """
    part = first_nonfinite_part(engine, token_ids)
    return NotFinite("target", dtype_name(engine.dtype), request_id, round_number, part)


@torch.inference_mode()
def first_nonfinite_part(engine: Engine, token_ids: list[int]) -> str | None:
    """Find the first part of a target whose output for a text is not finite.

    The text runs in a pool of its own. None: every output is finite, or ranks share the target, so that one alone can
    run no forward.
    """
    if engine.options.tensor_parallel > 1:
        return None
    layers = range(engine.target.config.num_layers)
    entering = ["the embedding", *(f"layer {layer}" for layer in layers)]
    hidden_R = torch.empty(0)
    for hidden_R in TextForward(engine, len(token_ids)).extend(token_ids):
        is_finite = hidden_R.isfinite().all(-1).all(0).tolist()
        if not all(is_finite):
            return entering[is_finite.index(False)]
    is_finite = bool(engine.target.logits(hidden_R[-1:, -1].contiguous()).isfinite().all())
    return None if is_finite else "the output head"
