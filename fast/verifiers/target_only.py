"""Target-only sampling, which accepts drafts with the target's own probability."""

from typing import no_type_check

import triton
import triton.language as tl

from specsim.fast.acceptance import LinkTables, Verification
from specsim.fast.runtime.launch import await_input, kernel
from specsim.fast.runtime.uniforms import ACCEPT, named_uniform
from specsim.fast.vocabulary.distribution import Siblings, kept_mass, weight


@triton.jit
@no_type_check
def _accepted_child(distributions, row, siblings, uniform, threshold_single, threshold_acc):
    """Find the first of the siblings that the uniform accepts at a row, -1 if none."""
    child = siblings.first
    num_nodes = siblings.num_nodes
    mass = kept_mass(distributions, row)
    accumulated = tl.full((), 0, tl.float32)
    accepted = tl.full((), -1, tl.int64)
    tried = 0
    while (child >= 0) & (child < num_nodes) & (accepted < 0) & (tried < num_nodes):
        child_weight = weight(distributions, row, tl.load(siblings.tokens_ptr + child))
        accumulated += child_weight
        enough = uniform * (threshold_acc * mass) <= accumulated
        accepted = tl.where(enough | (child_weight >= threshold_single * mass), child, accepted)
        child = tl.load(siblings.next_sibling_ptr + child)
        tried += 1
    return accepted


@kernel
@no_type_check
def _walk_kernel(
    distributions,
    link_ptrs,
    requests,
    uniforms_ptr,
    path_ptrs,
    rejected_ptr,
    num_nodes,
    num_steps,
    max_len,
    threshold_single,
    threshold_acc,
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
    while descending:
        if uniforms_ptr is None:
            uniform = named_uniform(seed, request_id, ACCEPT, length, drafts, tl.full((), 0, tl.int32))
        else:
            uniform = tl.load(uniforms_ptr + request * (num_steps + 1) + drafts).to(tl.float32)
        first = tl.load(link_ptrs.next_token_ptr + root + node)
        siblings = Siblings(link_ptrs.tokens_ptr + root, link_ptrs.next_sibling_ptr + root, first, num_nodes)
        child = _accepted_child(distributions, root + node, siblings, uniform, single, acc)
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


def accept(inputs: Verification) -> None:
    """Write every request's path, and the first rejected child at its end."""
    config = inputs.config
    _walk_kernel[(len(inputs.rejected_B),)](
        distributions=inputs.distributions.tables,
        link_ptrs=LinkTables.of(inputs.tree),
        requests=inputs.requests,
        uniforms_ptr=inputs.accept_uniforms,
        path_ptrs=inputs.paths,
        rejected_ptr=inputs.rejected_B,
        num_nodes=config.num_draft_tokens,
        num_steps=config.num_steps,
        max_len=config.length_limit,
        threshold_single=config.threshold_single,
        threshold_acc=max(config.threshold_acc, 1e-9),
    )
