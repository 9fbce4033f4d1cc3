"""Maps between the ids of drafts and of the target, and distributions of drafts that are written by target id."""

from typing import NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel
from specsim.fast.vocabulary.summaries import weights_of

BLOCK = 2048  # tokens of a program


class Vocabulary(NamedTuple):
    """Maps between draft and target ids, None where the vocabularies are the same."""

    d2t: torch.Tensor | None = None  # i64 [draft vocabulary], target id minus draft id
    t2d: torch.Tensor | None = None  # i64 [V], draft id, -1 for a token that cannot be drafted


def inverse_of(d2t: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Compute the draft id of every target id, i64 [V], -1 for a token outside the draft vocabulary."""
    ids = torch.arange(len(d2t), device=d2t.device)
    return torch.full((vocab_size,), -1, device=d2t.device).index_put((ids + d2t,), ids)


@kernel
@no_type_check
def _write_kernel(
    logits_ptr,
    moments_ptr,
    t2d_ptr,
    step_ptr,
    draft_prob_ptr,
    num_lanes,
    num_parents,
    num_steps,
    draft_vocab_size,
    vocab_size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write some tokens of one row's distribution, by target id.

    In the loop the row is a lane of a step.
    """
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    request = row // num_lanes
    parent = tl.full((), 0, tl.int64)
    await_input(PDL)
    mask = tokens < vocab_size
    draft_ids = tokens
    if step_ptr is not None:
        step = tl.load(step_ptr)
        parent = 1 + step * num_lanes + row % num_lanes
        mask &= step < num_steps - 1
    if t2d_ptr is not None:
        draft_ids = tl.load(t2d_ptr + tokens, mask=mask, other=-1)
    best = tl.load(moments_ptr + row * 3)
    scale = tl.load(moments_ptr + row * 3 + 1)
    total = tl.load(moments_ptr + row * 3 + 2)
    known = mask & (draft_ids >= 0) & (draft_ids < tl.where(total > 0, draft_vocab_size, 0))
    logits = tl.load(logits_ptr + row * draft_vocab_size + draft_ids, mask=known, other=-float("inf")).to(tl.float32)
    prob = tl.where(known, weights_of(logits, best, scale) / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(draft_prob_ptr + (request * num_parents + parent) * vocab_size + tokens, prob, mask=mask)


def write_draft_prob(
    logits_RV: torch.Tensor,
    moments: torch.Tensor,
    vocabulary: Vocabulary,
    draft_prob: torch.Tensor,
    num_lanes: int,
    step: torch.Tensor | None,
    num_steps: int,
) -> None:
    """Write the distribution of every row of draft logits by target id.

    draft_prob: f32 [B, V], or [B, 1+K(S-1), V] in the loop of a draft phase.
    moments: f32 [R, 3], the largest logit, log2(e) / T and the sum of all weights, 0 where the distribution is zeros.
    step: i32, read on the device; None outside the loop.
    """
    num_rows, draft_vocab_size = logits_RV.shape
    vocab_size = draft_prob.shape[-1]
    block = block_of(vocab_size, BLOCK)
    _write_kernel[num_rows, ceil_div(vocab_size, block)](
        logits_ptr=logits_RV,
        moments_ptr=moments,
        t2d_ptr=vocabulary.t2d,
        step_ptr=step,
        draft_prob_ptr=draft_prob,
        num_lanes=num_lanes,
        num_parents=draft_prob[0].numel() // vocab_size if len(draft_prob) else 1,
        num_steps=num_steps,
        draft_vocab_size=draft_vocab_size,
        vocab_size=vocab_size,
        BLOCK=block,
    )
