"""Sampled drafts: the law of every row of the drafter's logits, and tokens drawn from it.

A law is told by weights 2^((x - max) · log2(e) / T) over the draft vocabulary, as in specsim.fast.sampling. Verify
reads it whole, by target id, and so it is written down.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch
from specsim.fast.runtime.launch import await_input, block_of, kernel, require_contiguous
from specsim.fast.runtime.uniforms import DRAFT, gumbel, named_uniform
from specsim.fast.vocabulary.draw import group_at, groups_block, token_at
from specsim.fast.vocabulary.summaries import GROUP, scale_of, summarise, weights_of

BLOCK = 2048  # tokens of a program
LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class Root:
    """L of the round that rows of drafts belong to: lens i64 [B], to which counts i32 [B] are still to be added."""

    lens: torch.Tensor
    counts: torch.Tensor | None = None


@triton.jit
def _place(requests, step_ptr, request):
    """(L of the round, depth of the nodes that drafts follow): 0 before a round, later the loop's step and one."""
    root_lens_ptr, counts_ptr = requests[3], requests[4]
    root_len, depth = tl.load(root_lens_ptr + request), tl.full((), 0, tl.int32)
    if counts_ptr is not None:
        root_len += tl.load(counts_ptr + request)
    if step_ptr is not None:
        depth = tl.load(step_ptr) + 1
    return root_len, depth


@triton.jit
def _is_drawn(requests, slots_ptr, request, row):
    drawn = tl.load(requests[0] + request) > 0
    if slots_ptr is not None:
        drawn &= tl.load(slots_ptr + row) >= 0
    return drawn


@kernel
def _noisy_kernel(
    logits_ptr, maxima_ptr, requests, step_ptr, slots_ptr, d2t_ptr, scores_ptr, tokens_ptr, num_lanes, vocab_size,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of some tokens of a row the one with the best logit / T + noise of its position."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request = row // num_lanes
    await_input(PDL)
    if _is_drawn(requests, slots_ptr, request, row):
        groups, count = tl.arange(0, GROUPS), tl.cdiv(vocab_size, GROUP)
        best = tl.max(tl.load(maxima_ptr + row * count + groups, mask=groups < count, other=-float("inf")), axis=0)
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        mask, target_ids = tokens < vocab_size, tokens
        if d2t_ptr is not None:
            target_ids += tl.load(d2t_ptr + tokens, mask=mask, other=0)
        seed, request_id = tl.load(requests[1] + request), tl.load(requests[2] + request)
        root_len, depth = _place(requests, step_ptr, request)
        logits = tl.load(logits_ptr + row * vocab_size + tokens, mask=mask, other=-float("inf")).to(tl.float32)
        scores = ((logits - best) * scale_of(tl.load(requests[0] + request))).to(tl.float64) * LN_2
        scores = tl.where(mask, scores + gumbel(seed, request_id, root_len + depth + 1, target_ids), -float("inf"))
        largest = tl.max(scores, axis=0)
        tl.store(scores_ptr + row * tl.num_programs(1) + block, largest)
        chosen = tl.min(tl.where(scores == largest, tokens, vocab_size - 1), axis=0)
        tl.store(tokens_ptr + row * tl.num_programs(1) + block, chosen)


@kernel
def _draw_kernel(
    logits_ptr, maxima_ptr, sums_ptr, noisy, requests, step_ptr, slots_ptr, d2t_ptr, topk_p_ptr, topk_index_ptr,
    moments_ptr, num_lanes, count, vocab_size, BLOCKS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The drafts of one row, each by a uniform of its own, or the best with noise; what is there stays if none are
    drawn.

    moments: the largest logit, log2(e) / T and the sum of all weights, 0 if none are drawn.
    """
    row = tl.program_id(0).to(tl.int64)
    request, lane = row // num_lanes, (row % num_lanes).to(tl.int32)
    await_input(PDL)
    drawn, scale = _is_drawn(requests, slots_ptr, request, row), scale_of(tl.load(requests[0] + request))
    groups, num_groups = tl.arange(0, GROUPS), tl.cdiv(vocab_size, GROUP)
    mask = groups < num_groups
    maxima = tl.load(maxima_ptr + row * num_groups + groups, mask=mask, other=-float("inf"))
    best = tl.max(maxima, axis=0)
    masses = tl.load(sums_ptr + row * num_groups + groups, mask=mask, other=0.0) * weights_of(maxima, best, scale)
    total = tl.sum(masses, axis=0)
    tl.store(moments_ptr + row * 3, best)
    tl.store(moments_ptr + row * 3 + 1, scale)
    tl.store(moments_ptr + row * 3 + 2, tl.where(drawn, total, 0.0))
    if drawn:
        root_len, depth = _place(requests, step_ptr, request)
        seed, request_id = tl.load(requests[1] + request), tl.load(requests[2] + request)
        logits_ptr += row * vocab_size
        for child in range(count):
            if noisy is not None:
                blocks = tl.arange(0, BLOCKS)
                num_blocks = noisy[2]
                scores = tl.load(noisy[0] + row * num_blocks + blocks, mask=blocks < num_blocks, other=-float("inf"))
                found = tl.min(tl.where(scores == tl.max(scores, axis=0), blocks, num_blocks - 1), axis=0)
                token = tl.load(noisy[1] + row * num_blocks + found)
            else:
                uniform = named_uniform(seed, request_id, DRAFT, root_len, depth, lane + child)
                group, before, bound = group_at(masses, uniform, GROUPS)
                tokens = group * GROUP + tl.arange(0, GROUP)
                logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=-float("inf")).to(tl.float32)
                token = token_at(tokens, weights_of(logits, best, scale), before, bound, vocab_size)
            chosen = weights_of(tl.load(logits_ptr + token).to(tl.float32), best, scale) / total
            target_id = token.to(tl.int64)
            if d2t_ptr is not None:
                target_id += tl.load(d2t_ptr + token)
            tl.store(topk_p_ptr + row * count + child, chosen)
            tl.store(topk_index_ptr + row * count + child, target_id)


@kernel
def _law_kernel(
    logits_ptr, moments_ptr, t2d_ptr, step_ptr, out_ptr, num_lanes, num_laws, num_steps, draft_vocab_size, vocab_size,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some of the law of one row, by target id; in the loop it is that of a step's lane."""
    row, tokens = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    request, law = row // num_lanes, tl.full((), 0, tl.int64)
    await_input(PDL)
    mask, draft_ids = tokens < vocab_size, tokens
    if step_ptr is not None:
        step = tl.load(step_ptr)
        law = 1 + step * num_lanes + row % num_lanes
        mask &= step < num_steps - 1
    if t2d_ptr is not None:
        draft_ids = tl.load(t2d_ptr + tokens, mask=mask, other=-1)
    best, scale = tl.load(moments_ptr + row * 3), tl.load(moments_ptr + row * 3 + 1)
    total = tl.load(moments_ptr + row * 3 + 2)
    known = mask & (draft_ids >= 0) & (draft_ids < tl.where(total > 0, draft_vocab_size, 0))
    logits = tl.load(logits_ptr + row * draft_vocab_size + draft_ids, mask=known, other=-float("inf")).to(tl.float32)
    prob = tl.where(known, weights_of(logits, best, scale) / tl.where(total > 0, total, 1.0), 0.0)
    tl.store(out_ptr + (request * num_laws + law) * vocab_size + tokens, prob, mask=mask)


def draw_drafts(
    batch: Batch,
    logits_RV: torch.Tensor,
    root: Root,
    vocabulary: tuple[torch.Tensor | None, torch.Tensor | None],
    is_gumbel: bool,
    out: tuple[torch.Tensor, torch.Tensor],
    law: torch.Tensor | None,
    loop: tuple[torch.Tensor, torch.Tensor, int] | None = None,
) -> None:
    """Sampled drafts of rows of logits in the place of the drafter's best, and the law they were drawn from.

    Rows of temperature 0, of padded requests and without a slot keep what is in `out` (topk_p, topk_index, [R, K]) and
    have a law of zeros. vocabulary: d2t, and its inverse i64 [V] with -1 where there is none; None where both
    vocabularies are one. law: f32 [B, V], or [B, 1+K(S-1), V] in the loop of a draft phase, whose loop is (step on the
    device, slots i64 [R], S); None where verify reads none.
    """
    (num_rows, draft_vocab_size), (d2t, t2d), (topk_p, topk_index) = logits_RV.shape, vocabulary, out
    require_contiguous(logits=logits_RV, d2t=d2t, topk_p=topk_p, topk_index=topk_index, law=law)
    step, slots, num_steps = loop or (None, None, 0)
    num_lanes, device = max(1, num_rows // max(1, batch.size)), logits_RV.device
    maxima, sums = summarise(logits_RV, batch.sampling.temperature, batch.request_ids)
    requests = batch.sampling.temperature, batch.seeds, batch.request_ids, root.lens, root.counts
    groups, block = groups_block(draft_vocab_size), block_of(draft_vocab_size, BLOCK)
    noisy, num_blocks = None, triton.cdiv(draft_vocab_size, block)
    if is_gumbel:
        scores = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=device)
        noisy = scores, torch.empty(num_rows, num_blocks, dtype=torch.int32, device=device), num_blocks
        _noisy_kernel[num_rows, num_blocks](
            logits_RV, maxima, requests, step, slots, d2t, *noisy[:2], num_lanes, draft_vocab_size, GROUPS=groups,
            GROUP=GROUP, BLOCK=block,
        )  # fmt: skip
    moments = torch.empty(num_rows, 3, dtype=torch.float32, device=device)
    _draw_kernel[(num_rows,)](
        logits_RV, maxima, sums, noisy, requests, step, slots, d2t, topk_p, topk_index, moments, num_lanes,
        topk_p.shape[-1], draft_vocab_size, BLOCKS=triton.next_power_of_2(num_blocks), GROUPS=groups, GROUP=GROUP,
    )  # fmt: skip
    if law is not None:
        vocab_size, block = law.shape[-1], block_of(law.shape[-1], BLOCK)
        _law_kernel[num_rows, triton.cdiv(vocab_size, block)](
            logits_RV, moments, t2d, step, law, num_lanes, law[0].numel() // vocab_size if len(law) else 1, num_steps,
            draft_vocab_size, vocab_size, BLOCK=block,
        )  # fmt: skip
