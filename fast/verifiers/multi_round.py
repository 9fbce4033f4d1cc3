"""Multi-round verification, which tries siblings in order, each on the residual after the ones before it."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.runtime.launch import await_input, kernel
from specsim.fast.verifiers.path import LinkTables, accept_uniform, depth_limit
from specsim.fast.verifiers.round import Round
from specsim.fast.vocabulary.draw import PER
from specsim.fast.vocabulary.residual import Residuals, residual, residual_mass, store_residual
from specsim.fast.vocabulary.summaries import GROUP


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
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Try siblings in order (SpecInfer, arXiv 2305.09781), each with its uniform, on the residual so far."""
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
        own = draft_prob_ptr + (request * limits.num_parents + node) * distributions.vocab_size
        draft_scale = tl.full((), 0.0, tl.float32)
        mass = tl.full((), 1.0, tl.float32)
        child = tl.load(link_ptrs.next_token_ptr + row)
        accepted = tl.full((), -1, tl.int64)
        tried = 0
        while (child > 0) & (child < num_nodes) & (accepted < 0) & (tried < num_lanes):
            token = tl.load(link_ptrs.tokens_ptr + root + child)
            lane = ((child - 1) % num_lanes).to(tl.int32)
            uniform = accept_uniform(requests, uniforms_ptr, request, num_nodes, child, drafts, lane)
            draft_prob = tl.load(own + token)
            left = residual(distributions, row, own, 1.0, draft_scale, token)
            passes = (greedy | (draft_prob > 0)) & (uniform * draft_prob * mass < left)
            accepted = tl.where(passes, child, -1)
            if accepted < 0:
                left = residual_mass(distributions, row, own, draft_scale + mass, GROUP, PER)
                draft_scale = tl.where(left > 0, draft_scale + mass, draft_scale)
                mass = tl.where(left > 0, left, mass)
            child = tl.load(link_ptrs.next_sibling_ptr + root + child)
            tried += 1
        moved = accepted >= 0
        node = tl.where(moved, accepted, node)
        drafts += moved.to(tl.int32)
        draft_scale = tl.where(moved, 0.0, draft_scale)
        tl.store(accept_index_ptr + drafts, (root + node).to(tl.int32), mask=moved)
        descending = moved & (drafts < limit)
    for step in range(drafts + 1, limits.num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(path_ptrs.num_drafts_ptr + request, drafts)
    store_residual(residual_ptrs, request, node, 1.0, draft_scale)


def accept(given: Round) -> torch.Tensor:
    """Write every request's path, and draw its bonus token, i32 [B]."""
    residuals = Residuals.empty(len(given.draft_prob), given.draft_prob.device)
    _multi_round_kernel[(len(given.draft_prob),)](
        distributions=given.distributions.tables,
        link_ptrs=LinkTables.of(given.tree),
        draft_prob_ptr=given.draft_prob,
        requests=given.requests,
        uniforms_ptr=given.accept_uniforms,
        path_ptrs=given.paths,
        residual_ptrs=residuals,
        limits=given.limits,
        num_lanes=given.config.topk,
        GROUP=GROUP,
        PER=PER,
    )
    return given.draw_bonus(residuals)
