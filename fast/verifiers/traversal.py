"""Traversal verification of lanes, which accepts the first path that passes from its leaf to the root.

A chain is one lane. Its verification is block verification: the longest prefix that passes is accepted.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.acceptance import Verification, accept_uniform, depth_limit, store_path
from specsim.fast.runtime.launch import await_input, kernel
from specsim.fast.vocabulary.distribution import PER, groups_block, only_token, prob_of
from specsim.fast.vocabulary.residual import Residuals, residual, residual_mass, residual_masses, store_residual
from specsim.fast.vocabulary.summaries import GROUP


class NodeWeights(NamedTuple):
    """Weights of nodes before their children are rejected, as kernel arguments."""

    nodes_ptr: torch.Tensor  # f32 [B, N], w; the root's is c in its residual relu(p - c q) without all lanes
    prefixes_ptr: Residuals  # [B · M], relu(w p - q) of nodes with children
    masses_ptr: torch.Tensor | None = None  # f32 [B · M, G], of the prefixes


@triton.jit
@no_type_check
def _ratio(target, draft_prob):
    """Compute min(1, target / draft_prob), 0 for a draft that was not drawn from draft_prob."""
    ratio = tl.where(target < draft_prob, target / tl.where(draft_prob > 0, draft_prob, 1.0), 1.0)
    return tl.where(draft_prob > 0, ratio, 0.0)


@kernel
@no_type_check
def _weights_kernel(
    distributions,
    tokens_ptr,
    draft_prob_ptr,
    seq_lens_ptr,
    weights,
    limits,
    num_lanes,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute w of every node, and store its residual relu(w p - q).

    Below the root, whose weight is 1, w = min(1, w of the parent · p(x) / q(x)). Every lane finds the root's p as the
    rejections of the lanes before it leave it, relu(p - c q) / m.
    """
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * limits.num_nodes
    draft_prob_ptr += request * limits.num_parents * distributions.vocab_size
    is_live = tl.load(seq_lens_ptr + request) > 0
    scale = tl.full((), 0.0, tl.float32)
    mass = tl.full((), 1.0, tl.float32)
    store_residual(weights.prefixes_ptr, request * limits.num_parents, tl.full((), 0, tl.int64), 1.0, 1.0)
    for lane in range(num_lanes):
        weight = tl.full((), 1.0, tl.float32)
        parent = tl.full((), 0, tl.int64)
        for step in range(limits.num_steps):
            node = tl.full((), 1, tl.int64) + step * num_lanes + lane
            if is_live:
                token = tl.load(tokens_ptr + root + node)
                row_ptr = draft_prob_ptr + parent * distributions.vocab_size
                target = prob_of(distributions, root + parent, token)
                if step == 0:
                    target = residual(distributions, root, draft_prob_ptr, 1.0, scale, token) / mass
                weight = _ratio(weight * target, tl.load(row_ptr + token))
            tl.store(weights.nodes_ptr + root + node, weight)
            if step < limits.num_steps - 1:
                store_residual(weights.prefixes_ptr, request * limits.num_parents + node, node, weight, 1.0)
            parent = node
        if (lane < num_lanes - 1) & is_live:
            rest = residual_mass(distributions, root, draft_prob_ptr, scale + mass, GROUP, PER)
            scale = tl.where(rest > 0, scale + mass, scale)
            mass = tl.where(rest > 0, rest, mass)
    tl.store(weights.nodes_ptr + root, scale + mass)


@kernel
@no_type_check
def _traversal_kernel(
    distributions,
    tokens_ptr,
    parents_ptr,
    requests,
    uniforms_ptr,
    weights,
    path_ptrs,
    residual_ptrs,
    limits,
    num_lanes,
    first_uniform,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Accept the deepest node that passes of the first lane that has one (arXiv 2505.12398, 2403.10444)."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * limits.num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    limit = depth_limit(limits, request, length).to(tl.int32)
    greedy = tl.load(requests.temperature_ptr + request) == 0
    drafts = tl.full((), 0, tl.int32)
    last = tl.full((), 0, tl.int64)
    last_weight = tl.full((), 1.0, tl.float32)
    groups = tl.arange(0, GROUPS)  # [GROUPS]
    num_groups = tl.cdiv(distributions.vocab_size, GROUP)
    lane = tl.full((), 0, tl.int32)
    while (lane < num_lanes) & (drafts == 0) & (limit > 0):
        follows = tl.full((), 1, tl.int32)
        parent = tl.full((), 0, tl.int64)
        for depth in range(1, limit + 1):
            node = tl.full((), 1, tl.int64) + (depth - 1) * num_lanes + lane
            weight = tl.load(weights.nodes_ptr + root + node)
            step = tl.full((), 0, tl.int32) + depth - 1
            column = node - 1 + first_uniform
            uniform = accept_uniform(requests, uniforms_ptr, request, limits.num_nodes, column, step, lane)
            mask = (groups < num_groups) & (depth < limit)
            row = request * limits.num_parents + node
            mass = tl.sum(tl.load(weights.masses_ptr + row * num_groups + groups, mask=mask, other=0.0), axis=0)
            passes = tl.where(depth < limit, uniform * (mass + 1 - weight) - mass, uniform - weight) < 0
            token = tl.load(tokens_ptr + root + node)
            follows = tl.where(token == only_token(distributions, root + parent), follows, 0)
            passes = tl.where(greedy, follows, tl.where(passes, 1, 0)) > 0
            drafts = tl.where(passes, step + 1, drafts)
            last = tl.where(passes, node, last)
            last_weight = tl.where(passes, weight, last_weight)
            parent = node
        lane += 1
    store_path(path_ptrs, parents_ptr, request, root, length, last, drafts, limits.num_steps)
    rejected = tl.where(drafts == 0, tl.load(weights.nodes_ptr + root), 1.0)
    is_residual = (drafts < limit) & (greedy == 0)
    scale = tl.where(is_residual, last_weight, 1.0)
    store_residual(residual_ptrs, request, last, scale, tl.where(is_residual, rejected, 0.0))


def accept(inputs: Verification) -> torch.Tensor:
    """Write every request's path, and draw its bonus token, i32 [B]."""
    draft_prob = inputs.draft_prob
    size, num_parents, _ = draft_prob.shape
    weights = NodeWeights(
        nodes_ptr=torch.empty(size, inputs.config.num_draft_tokens, dtype=torch.float32, device=draft_prob.device),
        prefixes_ptr=Residuals.empty(size * num_parents, draft_prob.device),
    )
    _weights_kernel[(size,)](
        distributions=inputs.distributions.tables,
        tokens_ptr=inputs.tree.draft_tokens,
        draft_prob_ptr=draft_prob,
        seq_lens_ptr=inputs.requests.seq_lens_ptr,
        weights=weights,
        limits=inputs.limits,
        num_lanes=inputs.config.topk,
        GROUP=GROUP,
        PER=PER,
    )
    masses = residual_masses(inputs.distributions, draft_prob, weights.prefixes_ptr, inputs.requests.seq_lens_ptr)
    residuals = Residuals.empty(size, draft_prob.device)
    _traversal_kernel[(size,)](
        distributions=inputs.distributions.tables,
        tokens_ptr=inputs.tree.draft_tokens,
        parents_ptr=inputs.tree.parents,
        requests=inputs.requests,
        uniforms_ptr=inputs.accept_uniforms,
        weights=weights._replace(masses_ptr=masses),
        path_ptrs=inputs.paths,
        residual_ptrs=residuals,
        limits=inputs.limits,
        num_lanes=inputs.config.topk,
        first_uniform=int(inputs.config.verifier_kind.draws == "node"),
        GROUPS=groups_block(inputs.distributions.logits.raw.shape[1]),
        GROUP=GROUP,
    )
    return inputs.draw_bonus(residuals)
