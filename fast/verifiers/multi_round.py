"""Verification of lanes: siblings are tried in order, each on the residual after the ones before it.

Multi-round verification has siblings drawn independently from q, recursive rejection those drawn without replacement.
Without replacement q is divided by the mass t that its remaining tokens have, so that the residual is relu(p - (c + m /
t) q) / m; a rejected token x needs no other form, because p(x) < q(x) / t leaves nothing of it.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.acceptance import LinkTables, Verification, accept_uniform, depth_limit
from specsim.fast.runtime.launch import await_input, kernel
from specsim.fast.vocabulary.distribution import PER, Siblings
from specsim.fast.vocabulary.residual import Residuals, residual, residual_mass, store_residual
from specsim.fast.vocabulary.summaries import GROUP


@triton.jit
@no_type_check
def _remaining_mass(draft_row_ptr, vocab_size, siblings, tried, BLOCK: tl.constexpr):
    """Sum q without the tokens of the first siblings, one more than `tried`."""
    mass = tl.full((), 0.0, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)  # [BLOCK]
        draft_prob = tl.load(draft_row_ptr + tokens, mask=tokens < vocab_size, other=0.0)
        node = siblings.first
        for _ in range(tried + 1):
            draft_prob = tl.where(tokens == tl.load(siblings.tokens_ptr + node), 0.0, draft_prob)
            node = tl.maximum(tl.load(siblings.next_sibling_ptr + node), 0)
        mass += tl.sum(draft_prob, axis=0)
    return mass


@kernel
@no_type_check
def _multi_round_kernel(
    distributions,
    link_ptrs,
    draft_prob_ptr,
    requests,
    uniforms_ptr,
    path_ptrs,
    residual_ptrs,
    limits,
    num_lanes,
    DISTINCT: tl.constexpr,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Try siblings in order, each with its uniform, on the residual so far (arXiv 2305.09781, 2402.14160)."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    num_nodes = limits.num_nodes
    root = request * num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    limit = depth_limit(limits, request, length)
    greedy = tl.load(requests.temperature_ptr + request) == 0  # its q is 0
    drafts = tl.full((), 0, tl.int32)
    accept_index_ptr = path_ptrs.accept_index_ptr + request * (limits.num_steps + 1)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    node = tl.full((), 0, tl.int64)
    descending = limit > 0
    draft_scale = tl.full((), 0.0, tl.float32)
    while descending:
        row = root + node
        draft_row_ptr = draft_prob_ptr + (request * limits.num_parents + node) * distributions.vocab_size
        draft_scale = tl.full((), 0.0, tl.float32)
        mass = tl.full((), 1.0, tl.float32)
        total = tl.full((), 1.0, tl.float32)  # of q's remaining tokens
        child = tl.load(link_ptrs.next_token_ptr + row)
        siblings = Siblings(link_ptrs.tokens_ptr + root, link_ptrs.next_sibling_ptr + root, child, num_nodes)
        accepted = tl.full((), -1, tl.int64)
        tried = 0
        while (child > 0) & (child < num_nodes) & (accepted < 0) & (tried < num_lanes):
            token = tl.load(link_ptrs.tokens_ptr + root + child)
            lane = ((child - 1) % num_lanes).to(tl.int32)
            uniform = accept_uniform(requests, uniforms_ptr, request, num_nodes, child, drafts, lane)
            draft_prob = tl.load(draft_row_ptr + token)
            rest = residual(distributions, row, draft_row_ptr, 1.0, draft_scale, token)
            passes = (greedy | ((draft_prob > 0) & (total > 0))) & (uniform * draft_prob * mass < rest * total)
            accepted = tl.where(passes, child, -1)
            if (accepted < 0) & (total > 0):
                scale = draft_scale + mass / total
                rest = residual_mass(distributions, row, draft_row_ptr, scale, GROUP, PER)
                draft_scale = tl.where(rest > 0, scale, draft_scale)
                mass = tl.where(rest > 0, rest, mass)
                if DISTINCT:
                    rest = _remaining_mass(draft_row_ptr, distributions.vocab_size, siblings, tried, PER * GROUP)
                    total = tl.where(greedy, total, rest)
            child = tl.load(link_ptrs.next_sibling_ptr + root + child)
            tried += 1
        descends = accepted >= 0
        node = tl.where(descends, accepted, node)
        drafts += descends.to(tl.int32)
        draft_scale = tl.where(descends, 0.0, draft_scale)
        tl.store(accept_index_ptr + drafts, (root + node).to(tl.int32), mask=descends)
        descending = descends & (drafts < limit)
    for step in range(drafts + 1, limits.num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(path_ptrs.num_drafts_ptr + request, drafts)
    store_residual(residual_ptrs, request, node, 1.0, draft_scale)


def accept(inputs: Verification) -> torch.Tensor:
    """Write every request's path, and draw its bonus token, i32 [B]."""
    residuals = Residuals.empty(len(inputs.draft_prob), inputs.draft_prob.device)
    _multi_round_kernel[(len(inputs.draft_prob),)](
        distributions=inputs.distributions.tables,
        link_ptrs=LinkTables.of(inputs.tree),
        draft_prob_ptr=inputs.draft_prob,
        requests=inputs.requests,
        uniforms_ptr=inputs.accept_uniforms,
        path_ptrs=inputs.paths,
        residual_ptrs=residuals,
        limits=inputs.limits,
        num_lanes=inputs.config.topk,
        DISTINCT=inputs.config.verifier_kind.drafts == "distinct",
        GROUP=GROUP,
        PER=PER,
    )
    return inputs.draw_bonus(residuals)
