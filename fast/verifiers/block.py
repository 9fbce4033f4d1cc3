"""Block verification of a chain, which accepts its longest prefix that passes."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.acceptance import Verification, accept_uniform, depth_limit, store_chain
from specsim.fast.runtime.launch import await_input, kernel
from specsim.fast.vocabulary.distribution import groups_block, only_token, prob_of
from specsim.fast.vocabulary.residual import Residuals, residual_masses, store_residual
from specsim.fast.vocabulary.summaries import GROUP


@triton.jit
@no_type_check
def _ratio(target, draft_prob):
    """Compute min(1, target / draft_prob), 0 for a draft that was not drawn from draft_prob."""
    ratio = tl.where(target < draft_prob, target / tl.where(draft_prob > 0, draft_prob, 1.0), 1.0)
    return tl.where(draft_prob > 0, ratio, 0.0)


@kernel
@no_type_check
def _ratios_kernel(distributions, tokens_ptr, draft_prob_ptr, seq_lens_ptr, residual_ptrs, limits, PDL: tl.constexpr):
    """Compute w_i of every node, and store its residual relu(w_i p - q).

    w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)).
    """
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * limits.num_nodes
    ratio = tl.full((), 1.0, tl.float32)
    for node in range(limits.num_steps):
        store_residual(residual_ptrs, request * limits.num_steps + node, tl.full((), 0, tl.int64) + node, ratio, 1.0)
        if tl.load(seq_lens_ptr + request) > 0:
            token = tl.load(tokens_ptr + root + node + 1)
            row = (request * limits.num_parents + node) * distributions.vocab_size
            draft_prob = tl.load(draft_prob_ptr + row + token)
            ratio = _ratio(ratio * prob_of(distributions, root + node, token), draft_prob)


@kernel
@no_type_check
def _block_kernel(
    distributions,
    tokens_ptr,
    draft_prob_ptr,
    requests,
    uniforms_ptr,
    ratios_ptr,
    masses_ptr,
    path_ptrs,
    residual_ptrs,
    limits,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Verify blocks (arXiv 2403.10444): every uniform is read, and the longest prefix that passes is accepted."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    num_steps = limits.num_steps
    root = request * limits.num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    lane = tl.full((), 0, tl.int32)
    limit = depth_limit(limits, request, length).to(tl.int32)
    greedy = tl.load(requests.temperature_ptr + request) == 0
    drafts = tl.full((), 0, tl.int32)
    follows = tl.full((), 1, tl.int32)
    last_ratio = tl.full((), 1.0, tl.float32)
    groups = tl.arange(0, GROUPS)  # [GROUPS]
    num_groups = tl.cdiv(distributions.vocab_size, GROUP)
    for node in range(1, limit + 1):
        token = tl.load(tokens_ptr + root + node)
        before = request * num_steps + node - 1
        row = (request * limits.num_parents + node - 1) * distributions.vocab_size
        draft_prob = tl.load(draft_prob_ptr + row + token)
        ratio = _ratio(tl.load(ratios_ptr + before * 2) * prob_of(distributions, root + node - 1, token), draft_prob)
        depth = (lane + node - 1).to(tl.int32)
        uniform = accept_uniform(requests, uniforms_ptr, request, num_steps + 1, node - 1, depth, lane)
        mask = (groups < num_groups) & (node < limit)
        masses = tl.load(masses_ptr + (before + 1) * num_groups + groups, mask=mask, other=0.0)
        mass = tl.sum(masses, axis=0)
        passes = tl.where(node < limit, uniform * (mass + 1 - ratio) - mass, uniform - ratio) < 0
        follows = tl.where(token == only_token(distributions, root + node - 1), follows, 0)
        passes = tl.where(greedy, follows, tl.where(passes, 1, 0)) > 0
        drafts = tl.where(passes, lane + node, drafts)
        last_ratio = tl.where(passes, ratio, last_ratio)
    store_chain(path_ptrs, request, root, length, drafts, num_steps)
    has_residual = tl.where(greedy | (drafts >= limit), 0.0, 1.0)
    store_residual(
        residual_ptrs, request, drafts.to(tl.int64), tl.where(has_residual > 0, last_ratio, 1.0), has_residual
    )


def accept(inputs: Verification) -> torch.Tensor:
    """Write every request's path, and draw its bonus token, i32 [B]."""
    size = len(inputs.draft_prob)
    device = inputs.draft_prob.device
    residuals = Residuals.empty(size, device)
    prefixes = Residuals.empty(size * inputs.config.num_steps, device)
    _ratios_kernel[(size,)](
        distributions=inputs.distributions.tables,
        tokens_ptr=inputs.tree.draft_tokens,
        draft_prob_ptr=inputs.draft_prob,
        seq_lens_ptr=inputs.requests.seq_lens_ptr,
        residual_ptrs=prefixes,
        limits=inputs.limits,
    )
    _block_kernel[(size,)](
        distributions=inputs.distributions.tables,
        tokens_ptr=inputs.tree.draft_tokens,
        draft_prob_ptr=inputs.draft_prob,
        requests=inputs.requests,
        uniforms_ptr=inputs.accept_uniforms,
        ratios_ptr=prefixes.scales_ptr,
        masses_ptr=residual_masses(inputs.distributions, inputs.draft_prob, prefixes, inputs.requests.seq_lens_ptr),
        path_ptrs=inputs.paths,
        residual_ptrs=residuals,
        limits=inputs.limits,
        GROUPS=groups_block(inputs.distributions.logits.raw.shape[1]),
        GROUP=GROUP,
    )
    return inputs.draw_bonus(residuals)
