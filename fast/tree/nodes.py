"""Nodes of a verify tree, from the candidates selected for it, and the check that they form a tree."""

from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.phases import Candidates, ExplicitCandidates, VerifyInput
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.tree.selection import selected

MOST_EXPLICIT = 4096  # candidates of a request, which one program ranks
_ROWS = 32
_COLUMNS = 64


class MalformedTree(ValueError):
    """A parent list that is no tree, reported with request and node."""


class CandidateTables(NamedTuple):
    """Candidates as kernel arguments."""

    tokens_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    parent_list_ptr: torch.Tensor

    @classmethod
    def of(cls, candidates: Candidates) -> Self:
        return cls(candidates.tokens, candidates.scores, candidates.parent_list)


class TreeTables(NamedTuple):
    """A VerifyInput as kernel arguments."""

    draft_tokens_ptr: torch.Tensor
    parents_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    positions_ptr: torch.Tensor
    mask_ptr: torch.Tensor
    retrieve_index_ptr: torch.Tensor
    next_token_ptr: torch.Tensor
    next_sibling_ptr: torch.Tensor
    cache_locations_ptr: torch.Tensor
    proposed_depth_ptr: torch.Tensor

    @classmethod
    def of(cls, tree: VerifyInput) -> Self:
        return cls(
            draft_tokens_ptr=tree.draft_tokens,
            parents_ptr=tree.parents,
            scores_ptr=tree.scores,
            positions_ptr=tree.positions,
            mask_ptr=tree.mask,
            retrieve_index_ptr=tree.retrieve_index,
            next_token_ptr=tree.retrieve_next_token,
            next_sibling_ptr=tree.retrieve_next_sibling,
            cache_locations_ptr=tree.cache_locations,
            proposed_depth_ptr=tree.proposed_depth,
        )


class Roots(NamedTuple):
    """Roots of trees and the slots of their nodes, as kernel arguments."""

    bonus_tokens_ptr: torch.Tensor  # i32 [B]
    seq_lens_ptr: torch.Tensor  # i64 [B]
    cache_locations_ptr: torch.Tensor  # i64 [B, N], before the length limit
    draft_steps_ptr: torch.Tensor  # i32 [B], most depth of a node


@triton.jit
@no_type_check
def steps_of(root_ptrs, request, num_steps, mask=None):
    """Load the draft steps of requests, at most those of the setting."""
    return tl.maximum(tl.minimum(tl.load(root_ptrs.draft_steps_ptr + request, mask=mask), num_steps), 0)


@triton.jit
@no_type_check
def alive_candidates(root_ptrs, request, num_steps, k):
    """Count a request's candidates of its draft steps, which are the first ones."""
    steps = steps_of(root_ptrs, request, num_steps)
    return tl.where(steps > 0, k + (steps - 1) * k * k, 0)


@kernel
@no_type_check
def _alive_kernel(root_ptrs, out_ptr, num_steps, k, PDL: tl.constexpr):
    """Write the number of one request's candidates of its draft steps."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    tl.store(out_ptr + request, alive_candidates(root_ptrs, request, num_steps, k))


def num_alive(roots: Roots, config: SpecConfig) -> torch.Tensor:
    """Count every request's candidates of its draft steps, i32 [B]."""
    steps = roots.draft_steps_ptr
    out = torch.empty(len(steps), dtype=torch.int32, device=steps.device)
    _alive_kernel[(len(steps),)](root_ptrs=roots, out_ptr=out, num_steps=config.num_steps, k=config.topk)
    return out


@triton.jit
@no_type_check
def _parents(chosen_ptr, parent_list_ptr, node, num_nodes, num_blocks, k, COLUMNS: tl.constexpr):
    """Find (candidate, parent node, whether it has one) of nodes [ROWS, 1].

    A parent precedes its child. chosen_ptr, parent_list_ptr: those of the nodes' own request. A node without a parent
    gets the root.
    """
    mask = (node > 0) & (node < num_nodes)
    flat = tl.load(chosen_ptr + node - 1, mask=mask, other=0)
    block = flat // k
    inside = (flat >= 0) & (block < num_blocks)
    wanted = tl.load(parent_list_ptr + block, mask=mask & inside, other=-1)
    parent = tl.zeros_like(node)
    for start in range(1, num_nodes, COLUMNS):
        other = start + tl.arange(0, COLUMNS)[None, :]
        other_flat = tl.load(chosen_ptr + other - 1, mask=other < num_nodes, other=-1)
        matching = tl.where((other_flat == wanted) & (other < node), other, 0)
        parent = tl.maximum(parent, tl.max(matching, axis=1, keep_dims=True))
    parent = tl.where(inside & (block > 0), parent, 0)
    return flat, parent, inside & ((block == 0) | (parent > 0))


@triton.jit
@no_type_check
def store_nodes(tree_ptrs, entry, node, bonus, tokens, parent, scores, mask, LOG: tl.constexpr):
    """Store tokens, parents and scores of nodes, with the root's own values."""
    tl.store(tree_ptrs.draft_tokens_ptr + entry, tl.where(node == 0, bonus, tokens), mask=mask)
    tl.store(tree_ptrs.parents_ptr + entry, tl.where(node == 0, -1, parent).to(tl.int64), mask=mask)
    tl.store(tree_ptrs.scores_ptr + entry, tl.where(node == 0, 0.0 if LOG else 1.0, scores), mask=mask)


@kernel
@no_type_check
def _nodes_kernel(
    candidate_ptrs,
    chosen_ptr,
    root_ptrs,
    tree_ptrs,
    num_candidates,
    num_blocks,
    num_nodes,
    num_steps,
    k,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the nodes of one request, from its chosen candidates."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    chosen_ptr += request * (num_nodes - 1)
    parent_list_ptr = candidate_ptrs.parent_list_ptr + request * num_blocks
    flat, parent, _ = _parents(chosen_ptr, parent_list_ptr, node, num_nodes, num_blocks, k, COLUMNS)
    entry = request * num_nodes + node
    mask = node < num_nodes
    is_draft = mask & (node > 0) & (flat < alive_candidates(root_ptrs, request, num_steps, k))
    candidate = request * num_candidates + flat
    tokens = tl.load(candidate_ptrs.tokens_ptr + candidate, mask=is_draft, other=0)
    scores = tl.load(candidate_ptrs.scores_ptr + candidate, mask=is_draft, other=0.0)
    parent = tl.where(is_draft, parent, -1)
    bonus = tl.load(root_ptrs.bonus_tokens_ptr + request).to(tl.int64)
    store_nodes(tree_ptrs, entry, node, bonus, tokens, parent, scores, mask, LOG)
    steps = steps_of(root_ptrs, request, num_steps)
    tl.store(tree_ptrs.proposed_depth_ptr + request, steps, mask=tl.program_id(1) == 0)


def write_nodes(
    tree: VerifyInput, candidates: Candidates, top_scores_index: torch.Tensor, roots: Roots, config: SpecConfig
) -> None:
    """Write tokens, parents and scores of all nodes."""
    batch_size, num_nodes = tree.parents.shape
    columns = block_of(num_nodes, _COLUMNS)
    rows = block_of(num_nodes, _ROWS, columns)
    _nodes_kernel[(batch_size, ceil_div(num_nodes, rows))](
        candidate_ptrs=CandidateTables.of(candidates),
        chosen_ptr=top_scores_index,
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_candidates=config.num_candidates,
        num_blocks=candidates.parent_list.shape[1],
        num_nodes=num_nodes,
        num_steps=config.num_steps,
        k=config.topk,
        LOG=config.score == "logprob",
        ROWS=rows,
        COLUMNS=columns,
    )


@kernel
@no_type_check
def _malformed_kernel(
    chosen_ptr, parent_list_ptr, out_ptr, num_nodes, num_blocks, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Find the first node of one request that has no parent, unless a candidate is chosen twice."""
    request = tl.program_id(0).to(tl.int64)
    chosen_ptr += request * (num_nodes - 1)
    parent_list_ptr += request * num_blocks
    first = num_nodes
    twice = 0
    for start in range(1, num_nodes, ROWS):
        node = start + tl.arange(0, ROWS)[:, None]
        flat, _, rooted = _parents(chosen_ptr, parent_list_ptr, node, num_nodes, num_blocks, k, COLUMNS)
        bad = tl.where((node < num_nodes) & (rooted == 0), node, num_nodes)
        first = tl.minimum(first, tl.min(tl.min(bad, axis=1), axis=0))
        for other_start in range(1, num_nodes, COLUMNS):
            other = other_start + tl.arange(0, COLUMNS)[None, :]
            other_flat = tl.load(chosen_ptr + other - 1, mask=other < num_nodes, other=0)
            same = (other_flat == flat) & (other < node) & (node < num_nodes)
            twice = tl.maximum(twice, tl.max(tl.max(same.to(tl.int32), axis=1), axis=0))
    verdict = tl.where(twice > 0, 1, tl.where(first < num_nodes, 1 + first, 0))
    tl.store(out_ptr + request, verdict.to(tl.int32))


def malformed(candidates: Candidates, top_scores_index: torch.Tensor, config: SpecConfig) -> torch.Tensor:
    """Find malformed trees, i32 [B]: 0 for a correct one, 1 if a candidate is selected twice.

    Else it is 1 + the first node without a parent before it.
    """
    require_contiguous(top_scores_index=top_scores_index, parent_list=candidates.parent_list)
    batch_size, num_drafts = top_scores_index.shape
    num_nodes = num_drafts + 1
    out = torch.empty(batch_size, dtype=torch.int32, device=top_scores_index.device)
    _malformed_kernel[(batch_size,)](
        chosen_ptr=top_scores_index,
        parent_list_ptr=candidates.parent_list,
        out_ptr=out,
        num_nodes=num_nodes,
        num_blocks=candidates.parent_list.shape[1],
        k=config.topk,
        ROWS=block_of(num_nodes, _ROWS, num_nodes),
        COLUMNS=block_of(num_nodes, _COLUMNS),
    )
    return out


def check(candidates: Candidates, top_scores_index: torch.Tensor, config: SpecConfig) -> None:
    """Raise MalformedTree for the first malformed request.

    The check waits for the device, so it cannot run in a graph.
    """
    for request, verdict in enumerate(malformed(candidates, top_scores_index, config).tolist()):
        if verdict:
            chosen = top_scores_index[request].tolist()
            parent_list = candidates.parent_list[request].tolist()
            raise MalformedTree(f"request {request}{_fault(chosen, parent_list, config.topk, verdict - 1)}")


def _fault(chosen: list[int], parent_list: list[int], k: int, node: int) -> str:
    if node == 0:
        return f": a candidate is selected twice in {chosen}"
    flat = chosen[node - 1]
    if not 0 <= flat < len(parent_list) * k:
        return f", node {node}: candidate {flat} is outside the pool of {len(parent_list) * k}"
    return f", node {node}: parent candidate {parent_list[flat // k]} is not selected before it"


class ExplicitTables(NamedTuple):
    """Explicit candidates as kernel arguments."""

    tokens_ptr: torch.Tensor
    parents_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    num_alive_ptr: torch.Tensor

    @classmethod
    def of(cls, candidates: ExplicitCandidates) -> Self:
        return cls(candidates.tokens, candidates.parents, candidates.scores, candidates.num_alive)


@kernel
@no_type_check
def _explicit_nodes_kernel(
    candidate_ptrs,
    root_ptrs,
    tree_ptrs,
    num_candidates,
    num_nodes,
    num_steps,
    LOG: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select and write the nodes of one request, dead ones last.

    A candidate counts the lowest score on its path. draft_tokens first holds the chosen candidates.
    """
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    node = tl.arange(0, NODES)
    entry = request * num_nodes + node
    mask = node < num_nodes
    num_alive = tl.minimum(tl.load(candidate_ptrs.num_alive_ptr + request), num_candidates)
    is_alive = index < num_alive
    candidates = request * num_candidates + index
    scores = tl.load(candidate_ptrs.scores_ptr + candidates, mask=is_alive, other=0.0)
    stored_parents = tl.load(candidate_ptrs.parents_ptr + candidates, mask=is_alive, other=-1).to(tl.int32)
    parents = tl.where((stored_parents >= 0) & (stored_parents < index), stored_parents, -1)
    all_tokens = tl.load(candidate_ptrs.tokens_ptr + candidates, mask=is_alive, other=0)
    path_scores = scores
    ancestor = parents
    depth = is_alive.to(tl.int32)
    for _ in range(num_steps):
        is_node = ancestor >= 0
        depth += is_node.to(tl.int32)
        above = tl.gather(scores, tl.maximum(ancestor, 0), 0)
        path_scores = tl.where(is_node, tl.minimum(path_scores, above), path_scores)
        ancestor = tl.where(is_node, tl.gather(parents, tl.maximum(ancestor, 0), 0), -1)
    is_alive = is_alive & (depth <= steps_of(root_ptrs, request, num_steps))
    count = tl.minimum(tl.sum(is_alive.to(tl.int32), axis=0), num_nodes - 1)
    is_selected, rank = selected(path_scores[None, :], is_alive[None, :], count)
    node_of = tl.reshape(tl.where(is_selected, 1 + rank, 0), [BLOCK])
    tl.store(tree_ptrs.proposed_depth_ptr + request, tl.max(tl.where(node_of > 0, depth, 0), axis=0))
    tl.store(tree_ptrs.draft_tokens_ptr + request * num_nodes + node_of, index.to(tl.int64), mask=node_of > 0)
    tl.debug_barrier()  # all are written before any is read, and read before tokens take their place
    is_draft = (node > 0) & (node <= count)
    flat = tl.load(tree_ptrs.draft_tokens_ptr + entry, mask=is_draft, other=0).to(tl.int32)
    tl.debug_barrier()
    wanted = tl.gather(parents, flat, 0)
    parent = tl.where(wanted >= 0, tl.gather(node_of, tl.maximum(wanted, 0), 0), 0)
    tokens = tl.where(is_draft, tl.gather(all_tokens, flat, 0), 0)
    node_scores = tl.where(is_draft, tl.gather(scores, flat, 0), 0.0)
    bonus = tl.load(root_ptrs.bonus_tokens_ptr + request).to(tl.int64)
    store_nodes(tree_ptrs, entry, node, bonus, tokens, tl.where(is_draft, parent, -1), node_scores, mask, LOG)


def write_explicit_nodes(tree: VerifyInput, candidates: ExplicitCandidates, roots: Roots, config: SpecConfig) -> None:
    """Write tokens, parents, scores and proposed depths of all nodes.

    Raises InputError for more candidates than one program ranks.
    """
    batch_size, num_candidates = candidates.tokens.shape
    if num_candidates > MOST_EXPLICIT:
        raise InputError("candidates", num_candidates, f"at most {MOST_EXPLICIT} of a request with impl 'fast'")
    block = next_power_of_2(max(num_candidates, 1))
    _explicit_nodes_kernel[(batch_size,)](
        candidate_ptrs=ExplicitTables.of(candidates),
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_candidates=num_candidates,
        num_nodes=config.num_draft_tokens,
        num_steps=config.num_steps,
        LOG=config.score == "logprob",
        NODES=next_power_of_2(config.num_draft_tokens),
        BLOCK=block,
        num_warps=max(1, min(8, block // 64)),
    )
