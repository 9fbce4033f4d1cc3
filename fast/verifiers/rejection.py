"""Chain rejection, which tests the drafts of a chain one by one against the drafter's distribution."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.acceptance import Verification, accept_uniform, depth_limit, store_chain
from specsim.fast.runtime.launch import await_input, kernel
from specsim.fast.vocabulary.distribution import prob_of
from specsim.fast.vocabulary.residual import Residuals, store_residual


@kernel
@no_type_check
def _reject_kernel(
    distributions,
    tokens_ptr,
    draft_prob_ptr,
    requests,
    uniforms_ptr,
    path_ptrs,
    residual_ptrs,
    limits,
    PDL: tl.constexpr,
):
    """Accept drafts while 0 < q and uniform · q < p (chain rejection, arXiv 2211.17192)."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * limits.num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    lane = tl.full((), 0, tl.int32)
    limit = depth_limit(limits, request, length)
    greedy = tl.load(requests.temperature_ptr + request) == 0  # its q is 0
    drafts = tl.full((), 0, tl.int32)
    rejected = tl.full((), 0, tl.int32)
    while (drafts < limit) & (rejected == 0):
        token = tl.load(tokens_ptr + root + drafts + 1)
        row = (request * limits.num_parents + drafts) * distributions.vocab_size
        draft_prob = tl.load(draft_prob_ptr + row + token)
        uniform = accept_uniform(requests, uniforms_ptr, request, limits.num_steps + 1, drafts, drafts, lane)
        accepted = (greedy | (draft_prob > 0)) & (uniform * draft_prob < prob_of(distributions, root + drafts, token))
        rejected = tl.where(accepted, 0, 1)
        drafts += 1 - rejected
    store_chain(path_ptrs, request, root, length, drafts, limits.num_steps)
    store_residual(residual_ptrs, request, drafts.to(tl.int64), 1.0, rejected.to(tl.float32))


def accept(inputs: Verification) -> torch.Tensor:
    """Write every request's path, and draw its bonus token, i32 [B]."""
    residuals = Residuals.empty(len(inputs.draft_prob), inputs.draft_prob.device)
    _reject_kernel[(len(inputs.draft_prob),)](
        distributions=inputs.distributions.tables,
        tokens_ptr=inputs.tree.draft_tokens,
        draft_prob_ptr=inputs.draft_prob,
        requests=inputs.requests,
        uniforms_ptr=inputs.accept_uniforms,
        path_ptrs=inputs.paths,
        residual_ptrs=residuals,
        limits=inputs.limits,
    )
    return inputs.draw_bonus(residuals)
