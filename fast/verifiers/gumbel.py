"""Gumbel-max coupling, which accepts drafts while they are the tokens that the target draws."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.acceptance import Verification, depth_limit, store_chain
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2
from specsim.fast.runtime.uniforms import token_noise
from specsim.fast.vocabulary.distribution import BlockBests, best_token, only_token, store_best, weight

BLOCK = 2048  # tokens of a program


@kernel
@no_type_check
def _noisy_kernel(distributions, requests, bests, num_nodes, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Find the best token of a block by log p + noise, after one node of a chain."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = row // num_nodes
    await_input(PDL)
    tokens = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    seed = tl.load(requests.seeds_ptr + request)
    request_id = tl.load(requests.request_ids_ptr + request)
    length = tl.load(requests.seq_lens_ptr + request)
    scores = tl.full((BLOCK,), -float("inf"), tl.float64)
    if length > 0:
        weights = weight(distributions, row, tokens)
        noise = token_noise(seed, request_id, length + row % num_nodes + 1, tokens)
        scores = tl.log(tl.where(weights > 0, weights, 1.0).to(tl.float64)) + noise
        scores = tl.where(weights > 0, scores, -float("inf"))
    store_best(bests, row, block, tokens, scores, distributions.vocab_size - 1)


@kernel
@no_type_check
def _gumbel_kernel(
    distributions,
    bests,
    draft_tokens_ptr,
    requests,
    path_ptrs,
    bonus_ptr,
    limits,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Accept drafts while they are the target's tokens by Gumbel-max coupling (arXiv 2408.07978)."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * limits.num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    limit = depth_limit(limits, request, length)
    greedy = tl.load(requests.temperature_ptr + request) == 0
    drafts = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    bonus = tl.full((), 0, tl.int32)
    while going > 0:
        noisy = best_token(bests, root + drafts, BLOCKS)
        bonus = tl.where(greedy, only_token(distributions, root + drafts), noisy)
        draft = tl.load(draft_tokens_ptr + root + drafts + 1, mask=drafts < limit, other=-1)
        going = tl.where(drafts < limit, (draft == bonus).to(tl.int32), 0)
        drafts += going
    store_chain(path_ptrs, request, root, length, drafts, limits.num_steps)
    tl.store(bonus_ptr + request, bonus)


def accept(inputs: Verification) -> torch.Tensor:
    """Write every request's path, and return the target's token after it, i32 [B]."""
    num_rows, vocab_size = inputs.distributions.logits.raw.shape
    device = inputs.distributions.moments.device
    size = len(inputs.requests.seq_lens_ptr)
    block = block_of(vocab_size, BLOCK)
    num_blocks = ceil_div(vocab_size, block)
    bests = BlockBests.empty(num_rows, num_blocks, device)
    bonus = torch.empty(size, dtype=torch.int32, device=device)
    _noisy_kernel[num_rows, num_blocks](
        distributions=inputs.distributions.tables,
        requests=inputs.requests,
        bests=bests,
        num_nodes=inputs.config.num_draft_tokens,
        BLOCK=block,
    )
    _gumbel_kernel[(size,)](
        distributions=inputs.distributions.tables,
        bests=bests,
        draft_tokens_ptr=inputs.tree.draft_tokens,
        requests=inputs.requests,
        path_ptrs=inputs.paths,
        bonus_ptr=bonus,
        limits=inputs.limits,
        BLOCKS=next_power_of_2(num_blocks),
    )
    return bonus
