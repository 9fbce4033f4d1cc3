"""Nodes of a verify tree: the selection of its candidates, in one pass and without a sort, and their parents.

Scores are ranked by the keys of specsim.fast.vocabulary.topk: of equal scores, the lower index is better.
"""

from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, VerifyInput
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.vocabulary.topk import ordered

_ROWS = 32
_COLUMNS = 64


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


class RootTables(NamedTuple):
    """Roots of trees and the slots of their nodes, as kernel arguments."""

    bonus_tokens_ptr: torch.Tensor  # i32 [B]
    seq_lens_ptr: torch.Tensor  # i64 [B]
    cache_locations_ptr: torch.Tensor  # i64 [B, N], before the length limit
    draft_steps_ptr: torch.Tensor  # i32 [B], most depth of a node


@triton.jit
@no_type_check
def selected(scores, mask, count):
    """Select each row's `count` best of scores [ROWS, BLOCK]: (mask, number of selected ones before each).

    A bound is raised, two bits at a time, until exactly `count` scores reach it or it is the count-th best. Scores
    above it are selected, and the first of those equal to it. Three counts share a 64-bit word, so that one sum gives
    them all.
    """
    rank = tl.where(mask, ordered(scores), -0x80000000)  # no number's rank is that low
    bound = tl.full([scores.shape[0], 1], -0x80000000, tl.int64)
    reached = tl.full([scores.shape[0], 1], -1, tl.int64)
    shift = 30
    while (shift >= 0) & (tl.max(tl.max((reached != count).to(tl.int32), axis=1), axis=0) > 0):
        unit = tl.full((), 1, tl.int64) << shift
        counts = tl.zeros(rank.shape, tl.int64)
        for part in tl.static_range(1, 4):
            raised = (bound + part * unit).to(tl.int32)
            counts += (rank >= raised).to(tl.int64) << (20 * part - 20)
        sums = tl.sum(counts, axis=1, keep_dims=True)
        lower = bound
        for part in tl.static_range(1, 4):
            reaching = (sums >> (20 * part - 20)) & 0xFFFFF
            bound = tl.where(reaching >= count, lower + part * unit, bound)
            reached = tl.where(reaching >= count, reaching, reached)
        shift -= 2
    above = rank > bound.to(tl.int32)
    equal = (rank == bound.to(tl.int32)) & mask
    counted = tl.cumsum((above.to(tl.int64) << 32) | equal.to(tl.int64), axis=1)  # of both at once
    missing = count - tl.sum(above.to(tl.int32), axis=1, keep_dims=True)
    equals = (counted & 0xFFFFFFFF).to(tl.int32)
    is_selected = above | (equal & (equals <= missing))
    return is_selected, (counted >> 32).to(tl.int32) + tl.minimum(equals, missing) - is_selected.to(tl.int32)


@kernel
@no_type_check
def _select_kernel(
    scores_ptr,
    num_alive_ptr,
    out_ptr,
    num_rows,
    num_candidates,
    count,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    index = tl.arange(0, BLOCK)[None, :]
    mask = (rows < num_rows) & (index < num_candidates)
    scores = tl.load(scores_ptr + rows * num_candidates + index, mask=mask, other=0.0)
    if num_alive_ptr is not None:
        scores = tl.where(index < tl.load(num_alive_ptr + rows, mask=rows < num_rows, other=0), scores, -float("inf"))
    is_selected, order = selected(scores, mask, count)
    tl.store(out_ptr + rows * count + order, index, mask=is_selected)


def select(
    scores: torch.Tensor, count: int, num_alive: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Select the `count` best candidates, as ascending flat indices i64 [B, count].

    num_alive: i32 [B], the first num_alive candidates of a request go before all others; None: there are no others.
    Fused: selection and ordering, without a sort.
    """
    num_rows, num_candidates = scores.shape
    if count > num_candidates:
        raise ValueError(f"{count} candidates to select, there are {num_candidates}")
    require_contiguous(scores=scores)
    out = torch.empty(num_rows, count, dtype=torch.int64, device=scores.device) if out is None else out
    block = next_power_of_2(max(num_candidates, 1))
    rows = block_of(num_rows, 1, block)
    _select_kernel[(ceil_div(num_rows, rows),)](
        scores_ptr=scores,
        num_alive_ptr=num_alive,
        out_ptr=out,
        num_rows=num_rows,
        num_candidates=num_candidates,
        count=count,
        ROWS=rows,
        BLOCK=block,
        num_warps=4 if block <= 2048 else 16,
    )
    return out


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


def num_alive(roots: RootTables, config: SpecConfig) -> torch.Tensor:
    """Count every request's candidates of its draft steps, i32 [B]."""
    steps = roots.draft_steps_ptr
    out = torch.empty(len(steps), dtype=torch.int32, device=steps.device)
    _alive_kernel[(len(steps),)](root_ptrs=roots, out_ptr=out, num_steps=config.num_steps, k=config.topk)
    return out


@triton.jit
@no_type_check
def parents_of(chosen_ptr, parent_list_ptr, node, num_nodes, num_blocks, k, COLUMNS: tl.constexpr):
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
    flat, parent, _ = parents_of(chosen_ptr, parent_list_ptr, node, num_nodes, num_blocks, k, COLUMNS)
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
    tree: VerifyInput, candidates: Candidates, top_scores_index: torch.Tensor, roots: RootTables, config: SpecConfig
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
