"""Sampled drafts: the distribution of every row of draft logits, and tokens drawn from it.

Tokens of the draft vocabulary have weights 2^((x - max) · log2(e) / T), as in specsim.fast.sampling. The distribution
is written in full, by target id, because verify reads all of it.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.runtime.uniforms import DRAFT, named_uniform, token_noise
from specsim.fast.vocabulary.distribution import (
    BlockBests,
    Requests,
    best_token,
    group_at,
    groups_block,
    store_best,
    token_at,
)
from specsim.fast.vocabulary.summaries import GROUP, scale_of, summarise, weights_of

BLOCK = 2048  # tokens of a program
LN_2 = tl.constexpr(0.6931471805599453)


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
    mask_id = mask & (draft_ids >= 0) & (draft_ids < tl.where(total > 0, draft_vocab_size, 0))
    logits = tl.load(logits_ptr + row * draft_vocab_size + draft_ids, mask=mask_id, other=-float("inf")).to(tl.float32)
    prob = tl.where(mask_id, weights_of(logits, best, scale) / tl.where(total > 0, total, 1.0), 0.0)
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


class Root(NamedTuple):
    """Length L of the round of some drafts, as kernel arguments."""

    lens_ptr: torch.Tensor  # i64 [B]
    counts_ptr: torch.Tensor | None = None  # i32 [B], still to be added to lens


class Loop(NamedTuple):
    """State of the draft loop for some rows."""

    step: torch.Tensor  # i32, read on the device
    slots: torch.Tensor | None  # i64 [R], -1 for a dropped row; None: no row is dropped
    num_steps: int


class DrawnDrafts(NamedTuple):
    """Drafts of R rows."""

    topk_scores: torch.Tensor  # f32 [R, K], each draft's probability or its logarithm
    topk_index: torch.Tensor  # i64 [R, K], target ids


@triton.jit
@no_type_check
def _name_of(root, step_ptr, request):
    """Compute (L of the round, depth of the drafts' parents).

    The depth is 0 before a round, and the loop's step plus one in it.
    """
    root_len = tl.load(root.lens_ptr + request)
    depth = tl.full((), 0, tl.int32)
    if root.counts_ptr is not None:
        root_len += tl.load(root.counts_ptr + request)
    if step_ptr is not None:
        depth = tl.load(step_ptr) + 1
    return root_len, depth


@triton.jit
@no_type_check
def _is_drawn(requests, slots_ptr, request, row):
    drawn = tl.load(requests.temperature_ptr + request) > 0
    if slots_ptr is not None:
        drawn &= tl.load(slots_ptr + row) >= 0
    return drawn


@kernel
@no_type_check
def _noisy_kernel(
    logits_ptr,
    maxima_ptr,
    requests,
    root,
    step_ptr,
    slots_ptr,
    d2t_ptr,
    bests,
    num_lanes,
    vocab_size,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the best token of a block by logit / T + noise of its position."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = row // num_lanes
    await_input(PDL)
    if _is_drawn(requests, slots_ptr, request, row):
        groups = tl.arange(0, GROUPS)  # [GROUPS]
        num_groups = tl.cdiv(vocab_size, GROUP)
        maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=groups < num_groups, other=-float("inf"))
        best = tl.max(maxima, axis=0)
        tokens = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        mask = tokens < vocab_size
        target_ids = tokens
        if d2t_ptr is not None:
            target_ids += tl.load(d2t_ptr + tokens, mask=mask, other=0)
        seed = tl.load(requests.seeds_ptr + request)
        request_id = tl.load(requests.request_ids_ptr + request)
        root_len, depth = _name_of(root, step_ptr, request)
        logits = tl.load(logits_ptr + row * vocab_size + tokens, mask=mask, other=-float("inf")).to(tl.float32)
        scale = scale_of(tl.load(requests.temperature_ptr + request))
        scores = ((logits - best) * scale).to(tl.float64) * LN_2
        scores = tl.where(mask, scores + token_noise(seed, request_id, root_len + depth + 1, target_ids), -float("inf"))
        store_best(bests, row, block, tokens, scores, vocab_size - 1)


@kernel
@no_type_check
def _draw_kernel(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    bests,
    requests,
    root,
    step_ptr,
    slots_ptr,
    d2t_ptr,
    drafts,
    moments_ptr,
    num_lanes,
    num_drafts,
    vocab_size,
    LOG: tl.constexpr,
    DISTINCT: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw drafts of one row, each by its own uniform, or as the best with noise.

    A row without drawn drafts keeps the old ones. DISTINCT: a power of two ≥ num_drafts where they are drawn without
    replacement, from all tokens again where no mass remains; else 0.

    moments: the largest logit, log2(e) / T and the sum of all weights, 0 if none are drawn.
    """
    row = tl.program_id(0).to(tl.int64)
    request = row // num_lanes
    lane = (row % num_lanes).to(tl.int32)
    await_input(PDL)
    drawn = _is_drawn(requests, slots_ptr, request, row)
    scale = scale_of(tl.load(requests.temperature_ptr + request))
    groups = tl.arange(0, GROUPS)  # [GROUPS]
    num_groups = tl.cdiv(vocab_size, GROUP)
    mask = groups < num_groups
    maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=mask, other=-float("inf"))
    best = tl.max(maxima, axis=0)
    masses = tl.load(sums_ptr + row * num_groups + groups, mask=mask, other=0.0) * weights_of(maxima, best, scale)
    total = tl.sum(masses, axis=0)
    tl.store(moments_ptr + row * 3, best)
    tl.store(moments_ptr + row * 3 + 1, scale)
    tl.store(moments_ptr + row * 3 + 2, tl.where(drawn, total, 0.0))
    if drawn:
        root_len, depth = _name_of(root, step_ptr, request)
        seed = tl.load(requests.seeds_ptr + request)
        request_id = tl.load(requests.request_ids_ptr + request)
        logits_ptr += row * vocab_size
        rest = masses  # [GROUPS], without the tokens drawn before
        if DISTINCT:
            elders = tl.full((DISTINCT,), -1, tl.int32)  # [DISTINCT]
        for child in range(num_drafts):
            if bests is not None:
                token = best_token(bests, row, BLOCKS)
            else:
                uniform = named_uniform(seed, request_id, DRAFT, root_len, depth, lane + child)
                remains = tl.sum(rest, axis=0) > 0
                group, before, bound = group_at(tl.where(remains, rest, masses), uniform, GROUPS)
                tokens = group * GROUP + tl.arange(0, GROUP)  # [GROUP]
                logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
                weights = weights_of(logits, best, scale)
                if DISTINCT:
                    is_elder = tl.sum((tokens[:, None] == elders[None, :]).to(tl.int32), axis=1) > 0  # [GROUP]
                    weights = tl.where(is_elder & remains, 0.0, weights)
                token = token_at(tokens, weights, before, bound, vocab_size)
                if DISTINCT:
                    others = tl.sum(tl.where(tokens == token, 0.0, weights), axis=0)
                    rest = tl.where((groups == group) & remains, others, rest)
                    elders = tl.where(tl.arange(0, DISTINCT) == child, token.to(tl.int32), elders)
            logit = tl.load(logits_ptr + token).to(tl.float32)
            if LOG:
                chosen = ((logit - best) * scale - tl.log2(total)) * LN_2
            else:
                chosen = weights_of(logit, best, scale) / total
            target_id = token.to(tl.int64)
            if d2t_ptr is not None:
                target_id += tl.load(d2t_ptr + token)
            tl.store(drafts.topk_scores + row * num_drafts + child, chosen)
            tl.store(drafts.topk_index + row * num_drafts + child, target_id)


def draw_drafts(
    batch: Batch,
    logits_RV: torch.Tensor,
    root: Root,
    vocabulary: Vocabulary,
    config: SpecConfig,
    out: DrawnDrafts,
    draft_prob: torch.Tensor | None,
    loop: Loop | None = None,
) -> None:
    """Sample drafts in place of the best ones in `out`, and write their distribution.

    Rows of temperature 0, of padded requests and without a slot keep what is in `out` and have a distribution of zeros.
    draft_prob: f32 [B, V], or [B, 1+K(S-1), V] in the loop of a draft phase; None where verify reads none.
    """
    num_rows, vocab_size = logits_RV.shape
    require_contiguous(logits=logits_RV, d2t=vocabulary.d2t, draft_prob=draft_prob, **out._asdict())
    step = None if loop is None else loop.step
    slots = None if loop is None else loop.slots
    num_lanes = max(1, num_rows // max(1, batch.size))
    maxima, sums = summarise(logits_RV, batch.sampling.temperature, batch.request_ids)
    requests = Requests.of(batch)
    groups = groups_block(vocab_size)
    block = block_of(vocab_size, BLOCK)
    num_blocks = ceil_div(vocab_size, block)
    bests = BlockBests.empty(num_rows, num_blocks, logits_RV.device) if config.verifier_kind.is_coupled else None
    if bests is not None:
        _noisy_kernel[num_rows, num_blocks](
            logits_ptr=logits_RV,
            maxima_ptr=maxima,
            requests=requests,
            root=root,
            step_ptr=step,
            slots_ptr=slots,
            d2t_ptr=vocabulary.d2t,
            bests=bests,
            num_lanes=num_lanes,
            vocab_size=vocab_size,
            GROUPS=groups,
            GROUP=GROUP,
            BLOCK=block,
        )
    moments = torch.empty(num_rows, 3, dtype=torch.float32, device=logits_RV.device)
    num_drafts = out.topk_scores.shape[-1]
    is_distinct = config.verifier_kind.drafts == "distinct" and loop is None  # deeper drafts have parents of their own
    _draw_kernel[(num_rows,)](
        logits_ptr=logits_RV,
        maxima_ptr=maxima,
        sums_ptr=sums,
        bests=bests,
        requests=requests,
        root=root,
        step_ptr=step,
        slots_ptr=slots,
        d2t_ptr=vocabulary.d2t,
        drafts=out,
        moments_ptr=moments,
        num_lanes=num_lanes,
        num_drafts=num_drafts,
        vocab_size=vocab_size,
        LOG=config.score == "logprob",
        DISTINCT=next_power_of_2(num_drafts) if is_distinct else 0,
        BLOCKS=next_power_of_2(num_blocks),
        GROUPS=groups,
        GROUP=GROUP,
    )
    if draft_prob is not None:
        num_steps = 0 if loop is None else loop.num_steps
        write_draft_prob(logits_RV, moments, vocabulary, draft_prob, num_lanes, step, num_steps)
