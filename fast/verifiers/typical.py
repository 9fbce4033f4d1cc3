"""Typical acceptance, in which drafts pass by the target's probability only."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.acceptance import Verification, depth_limit, store_path
from specsim.fast.runtime.launch import await_input, block_of, kernel, next_power_of_2
from specsim.fast.vocabulary.distribution import prob_of

BLOCK = 2048  # tokens that a program takes at a time


@kernel
@no_type_check
def _thresholds_kernel(
    distributions,
    temperature_ptr,
    thresholds_ptr,
    rows_per_request,
    epsilon,
    delta,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute min(ε, δ exp(-entropy)) of one row, or 0 for a greedy one, whose distribution has one token."""
    row = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    threshold = tl.full((), 0.0, tl.float32)
    if tl.load(temperature_ptr + row // rows_per_request) > 0:
        entropy = tl.full((), 0.0, tl.float32)
        for start in range(0, distributions.vocab_size, BLOCK):
            prob = prob_of(distributions, row, start + tl.arange(0, BLOCK))  # [BLOCK]
            entropy -= tl.sum(tl.where(prob > 0, prob * tl.log(tl.where(prob > 0, prob, 1.0)), 0.0), axis=0)
        threshold = tl.minimum(epsilon, delta * tl.exp(-entropy))
    tl.store(thresholds_ptr + row, threshold)


@kernel
@no_type_check
def _typical_kernel(
    distributions,
    tokens_ptr,
    parents_ptr,
    thresholds_ptr,
    seq_lens_ptr,
    path_ptrs,
    rejected_ptr,
    limits,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Accept the deepest node that passes with all its ancestors (Medusa, arXiv 2401.10774).

    Ties go to the most probable path, then to the first node.
    """
    request = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, NODES)  # [NODES]
    await_input(PDL)
    root = request * limits.num_nodes
    length = tl.load(seq_lens_ptr + request)
    limit = depth_limit(limits, request, length)
    depth = tl.where(offs == 0, 0, -1)
    path_prob = tl.where(offs == 0, 1.0, 0.0)
    for node in range(1, limits.num_nodes):
        link = tl.load(parents_ptr + root + node)  # -1: a dead node, which is accepted never
        parent = tl.maximum(link, 0)
        above = tl.sum(tl.where(offs == parent, depth, 0), axis=0)
        prob = prob_of(distributions, root + parent, tl.load(tokens_ptr + root + node))
        is_typical = tl.where(prob > tl.load(thresholds_ptr + root + parent), above, -1)
        accepted = tl.where((link >= 0) & (is_typical >= 0) & (is_typical < limit), node, -1)
        path_prob = tl.where(
            offs == accepted, prob * tl.sum(tl.where(offs == parent, path_prob, 0.0), axis=0), path_prob
        )
        depth = tl.where(offs == accepted, above + 1, depth)
    drafts = tl.max(depth, axis=0)
    path_prob = tl.where(depth == drafts, path_prob, -1.0)
    node = tl.min(tl.where(path_prob == tl.max(path_prob, axis=0), offs, NODES), axis=0).to(tl.int64)
    store_path(path_ptrs, parents_ptr, request, root, length, node, drafts, limits.num_steps)
    tl.store(rejected_ptr + request, -1)


def accept(inputs: Verification) -> None:
    """Write every request's path, whose bonus token is drawn from its last node's whole distribution."""
    config = inputs.config
    num_rows, vocab_size = inputs.distributions.logits.raw.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=inputs.rejected_B.device)
    _thresholds_kernel[(num_rows,)](
        distributions=inputs.distributions.tables,
        temperature_ptr=inputs.requests.temperature_ptr,
        thresholds_ptr=thresholds,
        rows_per_request=config.num_draft_tokens,
        epsilon=config.typical_epsilon,
        delta=config.typical_delta,
        BLOCK=block_of(vocab_size, BLOCK),
    )
    _typical_kernel[(len(inputs.rejected_B),)](
        distributions=inputs.distributions.tables,
        tokens_ptr=inputs.tree.draft_tokens,
        parents_ptr=inputs.tree.parents,
        thresholds_ptr=thresholds,
        seq_lens_ptr=inputs.requests.seq_lens_ptr,
        path_ptrs=inputs.paths,
        rejected_ptr=inputs.rejected_B,
        limits=inputs.limits,
        NODES=next_power_of_2(config.num_draft_tokens),
    )
