"""Errors for NaN and infinity in the states of a round, for the reference, serving and the checks.

The log probability of a token is NaN if, and only if, its row of logits holds NaN or +inf or nothing but -inf. It is on
the host in any case. The scores of drafts are not, so that only what reads a round's states checks them.
"""

from dataclasses import replace

import torch

from specsim.core.batch import Batch
from specsim.core.config import SamplingParams
from specsim.core.engine import Engine
from specsim.core.errors import NotFinite
from specsim.core.phases import Candidates, ExplicitCandidates, PrefillInput, VerifyInput

_ROWS = 512  # of one forward


def check_drafts(batch: Batch, drafts: Candidates | ExplicitCandidates | VerifyInput, dtype: torch.dtype) -> None:
    """Raise NotFinite if a score of the round's drafts is NaN, as those of logits with NaN or +inf are.

    Of a verify input the candidates count, where it has them.
    """
    chosen_from = drafts.candidates if isinstance(drafts, VerifyInput) else drafts
    is_nan_B = (chosen_from or drafts).scores.isnan().any(-1).tolist()
    if any(is_nan_B):
        index = is_nan_B.index(True)
        number = int(batch.num_rounds[index]) + 1
        raise NotFinite("drafter", _name(dtype), int(batch.request_ids[index]), number)


def target_error(engine: Engine, request_id: int, round_number: int, token_ids: list[int]) -> NotFinite:
    """Make the error for logits with NaN or +inf after a request's tokens, whose forward is run again.

    round_number: from 1; 0 is the prefill.
    """
    place = first_place(engine, token_ids)
    return NotFinite("target", _name(engine.dtype), request_id, round_number, place)


@torch.inference_mode()
def first_place(engine: Engine, token_ids: list[int]) -> str | None:
    """Find the first part of a target whose output for a text is not finite.

    The text runs in a pool of its own. None: every output is finite, or ranks share the target, so that one alone can
    run no forward.
    """
    if engine.options.tensor_parallel > 1:
        return None
    length = len(token_ids)
    config = engine.target.config
    pools = engine.make_pools(1, length + engine.config.page_size)
    row = pools.open()
    pools.reserve(row, length)
    whole = Batch.of([0], [row], [length], [SamplingParams()], config.vocab_size)
    entering = ["the embedding", *(f"layer {layer}" for layer in range(config.num_layers))]
    hidden_R = torch.empty(0)
    for start in range(0, length, _ROWS):
        chunk = PrefillInput.whole([token_ids[start : start + _ROWS]])
        batch = replace(whole, seq_lens=torch.tensor([start + len(chunk.input_ids)])).to(engine.device)
        chunk = replace(chunk, start_lens=torch.tensor([start])).to(engine.device)
        hidden_R = engine.hidden_states(batch, chunk, pools).unflatten(-1, (config.num_layers + 1, -1))
        is_finite = hidden_R.isfinite().all(-1).all(0).tolist()
        if not all(is_finite):
            return entering[is_finite.index(False)]
    is_finite = bool(engine.target.logits(hidden_R[-1:, -1].contiguous()).isfinite().all())
    return None if is_finite else "the output head"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
