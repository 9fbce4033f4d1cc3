"""Target-only sampling, which accepts drafts with the target's own probability."""

from typing import no_type_check

import triton
import triton.language as tl

from specsim.fast.runtime.launch import await_input, kernel, next_power_of_2, require_contiguous
from specsim.fast.runtime.uniforms import ACCEPT, named_uniform
from specsim.fast.verifiers.path import LinkTables
from specsim.fast.verifiers.round import Round
from specsim.fast.vocabulary.distribution import kept_mass, weight
from specsim.fast.vocabulary.draw import Siblings


@triton.jit
@no_type_check
def _node_weights(distributions, root, tokens_ptr, parents_ptr, num_nodes, NODES: tl.constexpr):
    """Compute the weight of every node's token at its parent, [NODES], 0 without one, so that a walk waits once."""
    offs = tl.arange(0, NODES)
    parents = tl.load(parents_ptr + root + offs, mask=offs < num_nodes, other=-1)
    tokens = tl.load(tokens_ptr + root + offs, mask=offs < num_nodes, other=-1)
    inside = (parents >= 0) & (parents < num_nodes)
    return weight(distributions, root + tl.where(inside, parents, 0), tl.where(inside, tokens, -1))


@triton.jit
@no_type_check
def _accepted_child(weights, siblings, uniform, single, acc):
    """Find the first of the siblings that the uniform accepts, -1 if none.

    weights: of all nodes, [NODES]. single, acc: thresholds times the mass of the siblings' distribution.
    """
    child = siblings.first
    num_nodes = siblings.num_nodes
    offs = tl.arange(0, weights.shape[0])
    accumulated = tl.full((), 0, tl.float32)
    accepted = tl.full((), -1, tl.int64)
    tried = 0
    while (child >= 0) & (child < num_nodes) & (accepted < 0) & (tried < num_nodes):
        child_weight = tl.sum(tl.where(offs == child, weights, 0.0), axis=0)
        accumulated += child_weight
        accepted = tl.where((uniform * acc <= accumulated) | (child_weight >= single), child, accepted)
        child = tl.load(siblings.next_sibling_ptr + child)
        tried += 1
    return accepted


@kernel
@no_type_check
def _walk_kernel(
    distributions,
    link_ptrs,
    parents_ptr,
    requests,
    uniforms_ptr,
    path_ptrs,
    rejected_ptr,
    num_nodes,
    num_steps,
    max_len,
    threshold_single,
    threshold_acc,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the path of one request by target-only sampling, and its end's first rejected child, -1 if none."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    seed = tl.load(requests.seeds_ptr + request)
    request_id = tl.load(requests.request_ids_ptr + request)
    greedy = tl.load(requests.temperature_ptr + request) == 0
    single = tl.where(greedy, 1.0, threshold_single)
    acc = tl.where(greedy, 1.0, threshold_acc)
    limit = tl.where(length > 0, tl.minimum(num_steps, max_len - 1 - length), 0)
    accept_index_ptr = path_ptrs.accept_index_ptr + request * (num_steps + 1)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    node = tl.full((), 0, tl.int64)
    drafts = tl.full((), 0, tl.int32)
    rejected = tl.full((), -1, tl.int64)
    descending = limit > 0
    weights = tl.zeros((NODES,), tl.float32)
    if descending:
        weights = _node_weights(distributions, root, link_ptrs.tokens_ptr, parents_ptr, num_nodes, NODES)
    while descending:
        if uniforms_ptr is None:
            uniform = named_uniform(seed, request_id, ACCEPT, length, drafts, tl.full((), 0, tl.int32))
        else:
            uniform = tl.load(uniforms_ptr + request * (num_steps + 1) + drafts).to(tl.float32)
        first = tl.load(link_ptrs.next_token_ptr + root + node)
        siblings = Siblings(link_ptrs.tokens_ptr + root, link_ptrs.next_sibling_ptr + root, first, num_nodes)
        mass = kept_mass(distributions, root + node)
        child = _accepted_child(weights, siblings, uniform, single * mass, acc * mass)
        accepted = child >= 0
        rejected = tl.where(accepted, -1, first)
        node = tl.where(accepted, child, node)
        drafts += accepted.to(tl.int32)
        tl.store(accept_index_ptr + drafts, (root + child).to(tl.int32), mask=accepted)
        descending = accepted & (drafts < limit)
    for step in range(drafts + 1, num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(path_ptrs.num_drafts_ptr + request, drafts)
    tl.store(rejected_ptr + request, rejected)


def accept(given: Round) -> None:
    """Write every request's path, and the first rejected child at its end."""
    config = given.config
    require_contiguous(parents=given.tree.parents)
    _walk_kernel[(len(given.rejected_B),)](
        distributions=given.distributions.tables,
        link_ptrs=LinkTables.of(given.tree),
        parents_ptr=given.tree.parents,
        requests=given.requests,
        uniforms_ptr=given.accept_uniforms,
        path_ptrs=given.paths,
        rejected_ptr=given.rejected_B,
        num_nodes=config.num_draft_tokens,
        num_steps=config.num_steps,
        max_len=config.length_limit,
        threshold_single=config.threshold_single,
        threshold_acc=max(config.threshold_acc, 1e-9),
        NODES=next_power_of_2(config.num_draft_tokens),
        num_warps=1,
    )
