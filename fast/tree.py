"""The verify tree: parents, depths, masks and the first-child / next-sibling arrays that verify walks."""

from dataclasses import replace
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, VerifyInput
from specsim.fast.drafting import select, selected
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous

_ROWS = 32
_COLUMNS = 64
_PREFIX = 256
_NO_LIMIT = 2**31 - 1
# A tree of at most so many nodes and candidates is built by one program.
_SMALL_NODES = 64
_SMALL_CANDIDATES = 2048


class MalformedTree(ValueError):
    """A parent list that is no tree; names the request and the node."""


class CandidateTables(NamedTuple):
    """Candidates as kernels take them."""

    tokens_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    parent_list_ptr: torch.Tensor

    @classmethod
    def of(cls, candidates: Candidates) -> Self:
        return cls(candidates.tokens, candidates.scores, candidates.parent_list)


class TreeTables(NamedTuple):
    """A VerifyInput as kernels write it."""

    draft_tokens_ptr: torch.Tensor
    parents_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    positions_ptr: torch.Tensor
    mask_ptr: torch.Tensor
    retrieve_index_ptr: torch.Tensor
    next_token_ptr: torch.Tensor
    next_sibling_ptr: torch.Tensor
    cache_locations_ptr: torch.Tensor

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
        )


class Roots(NamedTuple):
    """Roots of trees and the slots of their nodes, as kernels read them."""

    bonus_tokens_ptr: torch.Tensor  # i32 [B]
    seq_lens_ptr: torch.Tensor  # i64 [B]
    cache_locations_ptr: torch.Tensor  # i64 [B, N], before the length limit


@triton.jit
@no_type_check
def _parents(chosen_ptr, parent_list_ptr, node, num_nodes, num_blocks, k, COLUMNS: tl.constexpr):
    """(candidate, parent node, whether there is one) of nodes [ROWS, 1]; a parent stands before its child.

    chosen_ptr, parent_list_ptr: those of the nodes' own request. Where there is no parent the root stands in for it.
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
        found = tl.where((other_flat == wanted) & (other < node), other, 0)
        parent = tl.maximum(parent, tl.max(found, axis=1, keep_dims=True))
    parent = tl.where(inside & (block > 0), parent, 0)
    return flat, parent, inside & ((block == 0) | (parent > 0))


@triton.jit
@no_type_check
def _store_nodes(tree_ptrs, own, node, bonus, tokens, parent, scores, mask, LOG: tl.constexpr):
    """Note tokens, parents and scores of nodes, and the root's own."""
    tl.store(tree_ptrs.draft_tokens_ptr + own, tl.where(node == 0, bonus, tokens), mask=mask)
    tl.store(tree_ptrs.parents_ptr + own, tl.where(node == 0, -1, parent).to(tl.int64), mask=mask)
    tl.store(tree_ptrs.scores_ptr + own, tl.where(node == 0, 0.0 if LOG else 1.0, scores), mask=mask)


@triton.jit
@no_type_check
def _store_links(tree_ptrs, own, first_child, next_sibling, position, slot, num_nodes, max_len, mask):
    """Note links, positions and slots of nodes; a link to node num_nodes or beyond is none."""
    child = tl.where(first_child < num_nodes, first_child, -1)
    sibling = tl.where(next_sibling < num_nodes, next_sibling, -1)
    tl.store(tree_ptrs.positions_ptr + own, position, mask=mask)
    tl.store(tree_ptrs.retrieve_index_ptr + own, own, mask=mask)
    tl.store(tree_ptrs.next_token_ptr + own, child.to(tl.int64), mask=mask)
    tl.store(tree_ptrs.next_sibling_ptr + own, sibling.to(tl.int64), mask=mask)
    tl.store(tree_ptrs.cache_locations_ptr + own, tl.where(position < max_len, slot, -1), mask=mask)


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
    k,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Nodes of one request, from its chosen candidates."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    chosen_ptr += request * (num_nodes - 1)
    parent_list_ptr = candidate_ptrs.parent_list_ptr + request * num_blocks
    flat, parent, _ = _parents(chosen_ptr, parent_list_ptr, node, num_nodes, num_blocks, k, COLUMNS)
    own = request * num_nodes + node
    mask = node < num_nodes
    candidate = request * num_candidates + flat  # of the root any
    tokens = tl.load(candidate_ptrs.tokens_ptr + candidate, mask=mask)
    scores = tl.load(candidate_ptrs.scores_ptr + candidate, mask=mask)
    bonus = tl.load(root_ptrs.bonus_tokens_ptr + request).to(tl.int64)
    _store_nodes(tree_ptrs, own, node, bonus, tokens, parent, scores, mask, LOG)


@kernel
@no_type_check
def _links_kernel(
    root_ptrs,
    tree_ptrs,
    num_nodes,
    max_len,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Links, mask, positions and slots of one request's nodes, from their parents."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    first = request * num_nodes
    mask = node < num_nodes
    own = first + node
    parent = tl.load(tree_ptrs.parents_ptr + own, mask=mask, other=-1)
    first_child = tl.zeros_like(node) + num_nodes
    next_sibling = tl.zeros_like(node) + num_nodes
    for start in range(0, num_nodes, COLUMNS):
        other = start + tl.arange(0, COLUMNS)[None, :]
        mask_other = other < num_nodes
        tl.store(tree_ptrs.mask_ptr + own * num_nodes + other, other == node, mask=mask & mask_other)
        parent_of_other = tl.load(tree_ptrs.parents_ptr + first + other, mask=mask_other, other=-1)
        child = tl.where(parent_of_other == node, other, num_nodes)
        first_child = tl.minimum(first_child, tl.min(child, axis=1, keep_dims=True))
        sibling = tl.where((parent_of_other == parent) & (other > node), other, num_nodes)
        next_sibling = tl.minimum(next_sibling, tl.min(sibling, axis=1, keep_dims=True))
    tl.debug_barrier()  # the mask is cleared before ancestors are marked in it
    ancestor = tl.where(mask, node, 0).to(tl.int64)
    depth = tl.zeros_like(node)
    while tl.max(ancestor) > 0:  # ends: a parent's index is below its child's
        depth += (ancestor > 0).to(tl.int32)
        ancestor = tl.load(tree_ptrs.parents_ptr + first + ancestor, mask=ancestor > 0, other=0)
        tl.store(tree_ptrs.mask_ptr + own * num_nodes + ancestor, True, mask=mask)
    position = tl.load(root_ptrs.seq_lens_ptr + request) + depth
    slot = tl.load(root_ptrs.cache_locations_ptr + own, mask=mask)
    _store_links(tree_ptrs, own, first_child, next_sibling, position, slot, num_nodes, max_len, mask)


@kernel
@no_type_check
def _small_tree_kernel(
    candidate_ptrs,
    root_ptrs,
    tree_ptrs,
    num_candidates,
    num_nodes,
    num_steps,
    k,
    max_len,
    LOG: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Selection, nodes and links of one request; draft_tokens first holds the chosen candidates."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    node = tl.arange(0, NODES)
    first = request * num_nodes
    mask = node < num_nodes
    mask_draft = (node > 0) & (node < num_nodes)
    candidates = request * num_candidates + index
    is_candidate = index < num_candidates
    scores = tl.load(candidate_ptrs.scores_ptr + candidates, mask=is_candidate, other=0.0)
    all_tokens = tl.load(candidate_ptrs.tokens_ptr + candidates, mask=is_candidate, other=0)
    num_blocks = num_candidates // k
    own = first + node
    block_parents = tl.load(
        candidate_ptrs.parent_list_ptr + request * num_blocks + index, mask=index < num_blocks, other=-1
    )
    bonus = tl.load(root_ptrs.bonus_tokens_ptr + request).to(tl.int64)
    length = tl.load(root_ptrs.seq_lens_ptr + request)
    slot = tl.load(root_ptrs.cache_locations_ptr + own, mask=mask)
    kept, place = selected(scores[None, :], is_candidate[None, :], num_nodes - 1)
    node_of = tl.reshape(tl.where(kept, 1 + place, 0), [BLOCK])
    tl.store(tree_ptrs.draft_tokens_ptr + first + node_of, index.to(tl.int64), mask=node_of > 0)
    tl.debug_barrier()  # all are written before any is read, and read before tokens take their place
    flat = tl.load(tree_ptrs.draft_tokens_ptr + own, mask=mask_draft, other=0).to(tl.int32)
    tl.debug_barrier()
    wanted = tl.gather(block_parents, flat // k, 0)
    is_known = (flat >= k) & (wanted >= 0) & (wanted < num_candidates)
    parent = tl.gather(node_of, tl.where(is_known, wanted, 0).to(tl.int32), 0)
    parent = tl.where(is_known & (parent < node), parent, 0)
    parent = tl.where(mask_draft, parent, tl.where(node == 0, -1, -2))  # -2: of no node
    tokens = tl.gather(all_tokens, flat, 0)
    node_scores = tl.gather(scores, flat, 0)
    _store_nodes(tree_ptrs, own, node, bonus, tokens, parent, node_scores, mask, LOG)

    row = node[:, None]
    column = node[None, :]
    parent_of_column = parent[None, :]
    first_child = tl.min(tl.where(parent_of_column == row, column, NODES), axis=1)
    is_sibling = (parent_of_column == parent[:, None]) & (column > row)
    next_sibling = tl.min(tl.where(is_sibling, column, NODES), axis=1)
    sees = (column == row).to(tl.int32)
    ancestor = tl.where(mask, node, 0)
    depth = tl.zeros_like(node)
    for _ in range(num_steps):
        depth += (ancestor > 0).to(tl.int32)
        ancestor = tl.maximum(tl.gather(parent, ancestor, 0), 0)
        sees = tl.where(column == ancestor[:, None], 1, sees)
    tl.store(tree_ptrs.mask_ptr + own[:, None] * num_nodes + column, sees != 0, mask=mask[:, None] & mask[None, :])
    position = length + depth
    _store_links(tree_ptrs, own, first_child, next_sibling, position, slot, num_nodes, max_len, mask)


@kernel
@no_type_check
def _lanes_kernel(
    candidate_ptrs,
    root_ptrs,
    tree_ptrs,
    num_rows,
    num_nodes,
    k,
    max_len,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows are the nodes of all requests: the first k hang from the root, and node j from node j - k."""
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    request = rows // num_nodes
    node = rows % num_nodes
    mask = rows < num_rows
    candidate = rows - request - 1
    mask_draft = mask & (node > 0)
    tokens = tl.load(candidate_ptrs.tokens_ptr + candidate, mask=mask_draft)
    scores = tl.load(candidate_ptrs.scores_ptr + candidate, mask=mask_draft)
    bonus = tl.load(root_ptrs.bonus_tokens_ptr + request, mask=mask).to(tl.int64)
    _store_nodes(tree_ptrs, rows, node, bonus, tokens, tl.maximum(node - k, 0), scores, mask, LOG)
    position = tl.load(root_ptrs.seq_lens_ptr + request, mask=mask, other=0) + (node + k - 1) // k
    slot = tl.load(root_ptrs.cache_locations_ptr + rows, mask=mask)
    child = tl.where(node == 0, 1, node + k)
    sibling = tl.where((node > 0) & (node < k), node + 1, num_nodes)
    _store_links(tree_ptrs, rows, child, sibling, position, slot, num_nodes, max_len, mask)
    column = tl.arange(0, COLUMNS)[None, :]
    sees = (column == 0) | ((column <= node) & ((node - column) % k == 0))
    tl.store(tree_ptrs.mask_ptr + rows * num_nodes + column, sees, mask=mask & (column < num_nodes))


def build(
    candidates: Candidates,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    cache_locations: torch.Tensor,
    config: SpecConfig,
    *,
    out: VerifyInput | None = None,
) -> VerifyInput:
    """Select the N-1 best candidates of each request and lay them out below its bonus token; of a chain, and of sampled
    drafts, all.

    cache_locations: i64 [B, N], the slot of column L + j; a node at or beyond max_len loses its slot. A node whose
    parent is malformed hangs from the root: `check` finds it.
    """
    require_contiguous(
        tokens=candidates.tokens,
        scores=candidates.scores,
        parent_list=candidates.parent_list,
        bonus_tokens=bonus_tokens,
        seq_lens=seq_lens,
        cache_locations=cache_locations,
    )
    empty = out or _empty(len(bonus_tokens), config.num_draft_tokens, bonus_tokens.device)
    tree = replace(empty, candidates=replace(candidates, draft_prob=None), draft_prob=candidates.draft_prob)
    lay_out = _build_lanes if config.topk == 1 or config.is_sampled else _build_tree
    lay_out(tree, candidates, Roots(bonus_tokens, seq_lens, cache_locations), config)
    return tree


def _empty(batch_size: int, num_nodes: int, device: torch.device) -> VerifyInput:
    def table(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return VerifyInput(
        draft_tokens=table(batch_size, num_nodes),
        parents=table(batch_size, num_nodes),
        scores=table(batch_size, num_nodes, dtype=torch.float32),
        positions=table(batch_size * num_nodes),
        mask=table(batch_size, num_nodes, num_nodes, dtype=torch.bool),
        retrieve_index=table(batch_size, num_nodes),
        retrieve_next_token=table(batch_size, num_nodes),
        retrieve_next_sibling=table(batch_size, num_nodes),
        cache_locations=table(batch_size * num_nodes),
    )


def _limit(config: SpecConfig) -> int:
    return _NO_LIMIT if config.max_len is None else config.max_len


def _build_lanes(tree: VerifyInput, candidates: Candidates, roots: Roots, config: SpecConfig) -> None:
    num_rows = len(tree.positions)
    num_nodes = config.num_draft_tokens
    rows = block_of(num_rows, _ROWS, num_nodes)
    _lanes_kernel[(ceil_div(num_rows, rows),)](
        candidate_ptrs=CandidateTables.of(candidates),
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_rows=num_rows,
        num_nodes=num_nodes,
        k=config.topk,
        max_len=_limit(config),
        LOG=config.score == "logprob",
        ROWS=rows,
        COLUMNS=next_power_of_2(num_nodes),
    )


def _build_tree(tree: VerifyInput, candidates: Candidates, roots: Roots, config: SpecConfig) -> None:
    batch_size, num_nodes = tree.parents.shape
    if num_nodes <= _SMALL_NODES and config.num_candidates <= _SMALL_CANDIDATES:
        _build_small_tree(tree, candidates, roots, config)
        return
    columns = block_of(num_nodes, _COLUMNS)
    rows = block_of(num_nodes, _ROWS, columns)
    grid = batch_size, ceil_div(num_nodes, rows)
    _nodes_kernel[grid](
        candidate_ptrs=CandidateTables.of(candidates),
        chosen_ptr=select(candidates.scores, num_nodes - 1),
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_candidates=config.num_candidates,
        num_blocks=candidates.parent_list.shape[1],
        num_nodes=num_nodes,
        k=config.topk,
        LOG=config.score == "logprob",
        ROWS=rows,
        COLUMNS=columns,
    )
    _links_kernel[grid](
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_nodes=num_nodes,
        max_len=_limit(config),
        ROWS=rows,
        COLUMNS=columns,
    )


def _build_small_tree(tree: VerifyInput, candidates: Candidates, roots: Roots, config: SpecConfig) -> None:
    batch_size, num_nodes = tree.parents.shape
    _small_tree_kernel[(batch_size,)](
        candidate_ptrs=CandidateTables.of(candidates),
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_candidates=config.num_candidates,
        num_nodes=num_nodes,
        num_steps=config.num_steps,
        k=config.topk,
        max_len=_limit(config),
        LOG=config.score == "logprob",
        NODES=next_power_of_2(num_nodes),
        BLOCK=next_power_of_2(config.num_candidates),
        num_warps=8,
    )


@kernel
@no_type_check
def _malformed_kernel(
    chosen_ptr, parent_list_ptr, out_ptr, num_nodes, num_blocks, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The first node of one request that has no parent, unless a candidate is chosen twice."""
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
    found = tl.where(twice > 0, 1, tl.where(first < num_nodes, 1 + first, 0))
    tl.store(out_ptr + request, found.to(tl.int32))


def malformed(candidates: Candidates, top_scores_index: torch.Tensor, config: SpecConfig) -> torch.Tensor:
    """i32 [B]: 1 + the first node without a parent before it, 1 if a candidate is selected twice, 0 if all is well."""
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
    """Raise MalformedTree for the first malformed request; waits for the device, so not while a graph is captured."""
    for request, found in enumerate(malformed(candidates, top_scores_index, config).tolist()):
        if found:
            chosen = top_scores_index[request].tolist()
            parent_list = candidates.parent_list[request].tolist()
            raise MalformedTree(f"request {request}{_fault(chosen, parent_list, config.topk, found - 1)}")


def _fault(chosen: list[int], parent_list: list[int], k: int, node: int) -> str:
    if node == 0:
        return f": a candidate is selected twice in {chosen}"
    flat = chosen[node - 1]
    if not 0 <= flat < len(parent_list) * k:
        return f", node {node}: candidate {flat} is outside the pool of {len(parent_list) * k}"
    return f", node {node}: parent candidate {parent_list[flat // k]} is not selected before it"


@kernel
@no_type_check
def _full_mask_kernel(mask_ptr, seq_lens_ptr, out_ptr, batch_size, num_nodes, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    start = request * num_nodes * num_nodes
    for first in range(0, batch_size, BLOCK):
        before = first + tl.arange(0, BLOCK)
        start += num_nodes * tl.sum(tl.load(seq_lens_ptr + before, mask=before < request, other=0))
    prefix = tl.load(seq_lens_ptr + request)
    for first in range(0, prefix + num_nodes, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = (node < num_nodes) & (column < prefix + num_nodes)
        tree_column = (request * num_nodes + node) * num_nodes + column - prefix
        sees = tl.load(mask_ptr + tree_column, mask=mask & (column >= prefix), other=1)
        tl.store(out_ptr + start + node * (prefix + num_nodes) + column, sees, mask=mask)


def full_mask(mask_BNN: torch.Tensor, seq_lens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Layout FULL: flat bool, request after request N rows of L + N columns, the prefix columns true.

    Its size depends on seq_lens: without `out` the host reads them, so not while a graph is captured.
    """
    require_contiguous(mask_BNN=mask_BNN, seq_lens=seq_lens)
    batch_size, num_nodes = mask_BNN.shape[:2]
    if out is None:
        size = num_nodes * (int(seq_lens.sum()) + batch_size * num_nodes)
        out = torch.empty(size, dtype=torch.bool, device=mask_BNN.device)
    rows = block_of(num_nodes, 8, _PREFIX)
    _full_mask_kernel[(batch_size, ceil_div(num_nodes, rows))](
        mask_ptr=mask_BNN,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        batch_size=batch_size,
        num_nodes=num_nodes,
        ROWS=rows,
        BLOCK=_PREFIX,
    )
    return out


@kernel
@no_type_check
def _bitpacked_mask_kernel(mask_ptr, out_ptr, num_rows, num_nodes, ROWS: tl.constexpr, BITS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    word = tl.program_id(1)
    bit = tl.arange(0, BITS)[None, :].to(tl.int64)
    column = word * BITS + bit
    mask = (rows < num_rows) & (column < num_nodes)
    sees = tl.load(mask_ptr + rows * num_nodes + column, mask=mask, other=0)
    packed = tl.sum(sees.to(tl.int64) << bit, axis=1, keep_dims=True)
    tl.store(out_ptr + rows * tl.num_programs(1) + word, packed.to(out_ptr.dtype.element_ty), mask=rows < num_rows)


def bitpacked_mask(mask_BNN: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Layout QLEN_BITPACKED: bit c of a row's word is column c.

    uint8 [B, N] for N ≤ 8, int16 for N ≤ 16, int32 for N ≤ 32, beyond that int32 [B, N, ceil(N/32)]; signed words
    carry the bits.
    """
    require_contiguous(mask_BNN=mask_BNN)
    batch_size, num_nodes = mask_BNN.shape[:2]
    bits = next((bits for bits in (8, 16, 32) if num_nodes <= bits), 32)
    words = ceil_div(num_nodes, bits)
    num_rows = batch_size * num_nodes
    if out is None:
        shape = (batch_size, num_nodes) if words == 1 else (batch_size, num_nodes, words)
        dtype = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
        out = torch.empty(shape, dtype=dtype, device=mask_BNN.device)
    rows = block_of(num_rows, _ROWS, bits)
    _bitpacked_mask_kernel[(ceil_div(num_rows, rows), words)](
        mask_ptr=mask_BNN, out_ptr=out, num_rows=num_rows, num_nodes=num_nodes, ROWS=rows, BITS=bits
    )
    return out
