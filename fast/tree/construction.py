"""The verify tree: the best candidates of a draft phase, below the root, with links and a mask for attention.

A dead node, which has no parent and is not the root, gets no depth, mask, links or slot.
"""

from dataclasses import replace
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, ExplicitCandidates, VerifyInput
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.tree.explicit import write_explicit_nodes
from specsim.fast.tree.nodes import (
    CandidateTables,
    RootTables,
    TreeTables,
    alive_candidates,
    num_alive,
    select,
    selected,
    steps_of,
    store_nodes,
    write_nodes,
)

_ROWS = 32
_COLUMNS = 64
# Trees of at most this many nodes and candidates are built by one program each.
_SMALL_NODES = 64
_SMALL_CANDIDATES = 2048


@triton.jit
@no_type_check
def store_links(tree_ptrs, entry, first_child, next_sibling, position, slot, num_nodes, max_len, mask):
    """Store links, positions and slots of nodes, with -1 for a link to node num_nodes or beyond."""
    child = tl.where(first_child < num_nodes, first_child, -1)
    sibling = tl.where(next_sibling < num_nodes, next_sibling, -1)
    tl.store(tree_ptrs.positions_ptr + entry, position, mask=mask)
    tl.store(tree_ptrs.retrieve_index_ptr + entry, entry, mask=mask)
    tl.store(tree_ptrs.next_token_ptr + entry, child.to(tl.int64), mask=mask)
    tl.store(tree_ptrs.next_sibling_ptr + entry, sibling.to(tl.int64), mask=mask)
    tl.store(tree_ptrs.cache_locations_ptr + entry, tl.where(position < max_len, slot, -1), mask=mask)


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
    """Write links, mask, positions and slots of one request's nodes, from their parents."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    first = request * num_nodes
    mask = node < num_nodes
    entry = first + node
    parent = tl.load(tree_ptrs.parents_ptr + entry, mask=mask, other=-1)
    is_live = mask & ((node == 0) | (parent >= 0))
    first_child = tl.zeros_like(node) + num_nodes
    next_sibling = tl.zeros_like(node) + num_nodes
    for start in range(0, num_nodes, COLUMNS):
        other = start + tl.arange(0, COLUMNS)[None, :]
        mask_other = other < num_nodes
        tl.store(tree_ptrs.mask_ptr + entry * num_nodes + other, (other == node) & is_live, mask=mask & mask_other)
        parent_of_other = tl.load(tree_ptrs.parents_ptr + first + other, mask=mask_other, other=-1)
        child = tl.where(parent_of_other == node, other, num_nodes)
        first_child = tl.minimum(first_child, tl.min(child, axis=1, keep_dims=True))
        sibling = tl.where((parent_of_other == parent) & (parent >= 0) & (other > node), other, num_nodes)
        next_sibling = tl.minimum(next_sibling, tl.min(sibling, axis=1, keep_dims=True))
    tl.debug_barrier()  # the mask is cleared before ancestors are marked in it
    ancestor = tl.where(is_live, node, 0).to(tl.int64)
    depth = tl.zeros_like(node)
    while tl.max(ancestor) > 0:  # ends: a parent's index is below its child's
        depth += (ancestor > 0).to(tl.int32)
        ancestor = tl.load(tree_ptrs.parents_ptr + first + ancestor, mask=ancestor > 0, other=0)
        tl.store(tree_ptrs.mask_ptr + entry * num_nodes + ancestor, True, mask=is_live)
    position = tl.where(is_live, tl.load(root_ptrs.seq_lens_ptr + request) + depth, 0)
    slot = tl.load(root_ptrs.cache_locations_ptr + entry, mask=is_live, other=-1)
    store_links(tree_ptrs, entry, first_child, next_sibling, position, slot, num_nodes, max_len, mask)


def write_links(tree: VerifyInput, roots: RootTables, config: SpecConfig) -> None:
    """Write links, mask, positions and slots of all nodes, from their parents in the tree."""
    batch_size, num_nodes = tree.parents.shape
    columns = block_of(num_nodes, _COLUMNS)
    rows = block_of(num_nodes, _ROWS, columns)
    _links_kernel[(batch_size, ceil_div(num_nodes, rows))](
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_nodes=num_nodes,
        max_len=config.length_limit,
        ROWS=rows,
        COLUMNS=columns,
    )


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
    """Select, write and link the nodes of one request.

    draft_tokens first holds the chosen candidates.
    """
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    node = tl.arange(0, NODES)
    first = request * num_nodes
    mask = node < num_nodes
    candidates = request * num_candidates + index
    num_alive = alive_candidates(root_ptrs, request, num_steps, k)
    count = tl.minimum(num_alive, num_nodes - 1)
    mask_draft = (node > 0) & (node <= count)
    is_candidate = index < num_alive
    scores = tl.load(candidate_ptrs.scores_ptr + candidates, mask=is_candidate, other=0.0)
    all_tokens = tl.load(candidate_ptrs.tokens_ptr + candidates, mask=is_candidate, other=0)
    num_blocks = num_candidates // k
    entry = first + node
    block_parents = tl.load(
        candidate_ptrs.parent_list_ptr + request * num_blocks + index, mask=index < num_blocks, other=-1
    )
    bonus = tl.load(root_ptrs.bonus_tokens_ptr + request).to(tl.int64)
    length = tl.load(root_ptrs.seq_lens_ptr + request)
    is_live = node <= count
    slot = tl.load(root_ptrs.cache_locations_ptr + entry, mask=is_live, other=-1)
    is_selected, rank = selected(scores[None, :], is_candidate[None, :], count)
    node_of = tl.reshape(tl.where(is_selected, 1 + rank, 0), [BLOCK])
    tl.store(tree_ptrs.draft_tokens_ptr + first + node_of, index.to(tl.int64), mask=node_of > 0)
    tl.debug_barrier()  # all are written before any is read, and read before tokens take their place
    flat = tl.load(tree_ptrs.draft_tokens_ptr + entry, mask=mask_draft, other=0).to(tl.int32)
    tl.debug_barrier()
    wanted = tl.gather(block_parents, flat // k, 0)
    is_known = (flat >= k) & (wanted >= 0) & (wanted < num_candidates)
    parent = tl.gather(node_of, tl.where(is_known, wanted, 0).to(tl.int32), 0)
    parent = tl.where(is_known & (parent < node), parent, 0)
    parent = tl.where(mask_draft, parent, tl.where(node == 0, -1, -2))  # -2: of no node, or dead
    tokens = tl.where(mask_draft, tl.gather(all_tokens, flat, 0), 0)
    node_scores = tl.where(mask_draft, tl.gather(scores, flat, 0), 0.0)
    store_nodes(tree_ptrs, entry, node, bonus, tokens, tl.maximum(parent, -1), node_scores, mask, LOG)
    tl.store(tree_ptrs.proposed_depth_ptr + request, steps_of(root_ptrs, request, num_steps))

    row = node[:, None]
    column = node[None, :]
    parent_of_column = parent[None, :]
    first_child = tl.min(tl.where(parent_of_column == row, column, NODES), axis=1)
    is_sibling = (parent_of_column == parent[:, None]) & (column > row) & mask_draft[:, None]
    next_sibling = tl.min(tl.where(is_sibling, column, NODES), axis=1)
    sees = (column == row).to(tl.int32)
    ancestor = tl.where(is_live, node, 0)
    depth = tl.zeros_like(node)
    for _ in range(num_steps):
        depth += (ancestor > 0).to(tl.int32)
        ancestor = tl.maximum(tl.gather(parent, ancestor, 0), 0)
        sees = tl.where(column == ancestor[:, None], 1, sees)
    sees = (sees != 0) & is_live[:, None]
    tl.store(tree_ptrs.mask_ptr + entry[:, None] * num_nodes + column, sees, mask=mask[:, None] & mask[None, :])
    position = tl.where(is_live, length + depth, 0)
    store_links(tree_ptrs, entry, first_child, next_sibling, position, slot, num_nodes, max_len, mask)


def _build_small_tree(tree: VerifyInput, candidates: Candidates, roots: RootTables, config: SpecConfig) -> None:
    batch_size, num_nodes = tree.parents.shape
    block = next_power_of_2(num_nodes)
    _small_tree_kernel[(batch_size,)](
        candidate_ptrs=CandidateTables.of(candidates),
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_candidates=config.num_candidates,
        num_nodes=num_nodes,
        num_steps=config.num_steps,
        k=config.topk,
        max_len=config.length_limit,
        LOG=config.score == "logprob",
        NODES=block,
        BLOCK=next_power_of_2(config.num_candidates),
        num_warps=max(1, min(8, block // 8)),  # more only wait for each other: `specsim bench` times sizes of trees
    )


@kernel
@no_type_check
def _lanes_kernel(
    candidate_ptrs,
    root_ptrs,
    tree_ptrs,
    num_rows,
    num_nodes,
    num_steps,
    k,
    max_len,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the nodes of static trees, one row each.

    The parent of the first k is the root, that of node j is node j - k.
    """
    await_input(PDL)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    request = rows // num_nodes
    node = rows % num_nodes
    mask = rows < num_rows
    candidate = rows - request - 1
    steps = steps_of(root_ptrs, request, num_steps, mask)
    num_live = 1 + k * steps
    is_live = mask & (node < num_live)
    mask_draft = is_live & (node > 0)
    tokens = tl.load(candidate_ptrs.tokens_ptr + candidate, mask=mask_draft, other=0)
    scores = tl.load(candidate_ptrs.scores_ptr + candidate, mask=mask_draft, other=0.0)
    bonus = tl.load(root_ptrs.bonus_tokens_ptr + request, mask=mask).to(tl.int64)
    parent = tl.where(is_live, tl.maximum(node - k, 0), -1)
    store_nodes(tree_ptrs, rows, node, bonus, tokens, parent, scores, mask, LOG)
    tl.store(tree_ptrs.proposed_depth_ptr + request, steps, mask=mask & (node == 0))
    position = tl.load(root_ptrs.seq_lens_ptr + request, mask=mask, other=0) + (node + k - 1) // k
    position = tl.where(is_live, position, 0)
    slot = tl.load(root_ptrs.cache_locations_ptr + rows, mask=is_live, other=-1)
    child = tl.where(node == 0, 1, node + k)
    child = tl.where(child < num_live, child, num_nodes)
    sibling = tl.where(mask_draft & (node < k), node + 1, num_nodes)
    store_links(tree_ptrs, rows, child, sibling, position, slot, num_nodes, max_len, mask)
    column = tl.arange(0, COLUMNS)[None, :]
    sees = is_live & ((column == 0) | ((column <= node) & ((node - column) % k == 0)))
    tl.store(tree_ptrs.mask_ptr + rows * num_nodes + column, sees, mask=mask & (column < num_nodes))


def _build_lanes(tree: VerifyInput, candidates: Candidates, roots: RootTables, config: SpecConfig) -> None:
    num_rows = len(tree.positions)
    num_nodes = config.num_draft_tokens
    rows = block_of(num_rows, _ROWS, num_nodes)
    _lanes_kernel[(ceil_div(num_rows, rows),)](
        candidate_ptrs=CandidateTables.of(candidates),
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_rows=num_rows,
        num_nodes=num_nodes,
        num_steps=config.num_steps,
        k=config.topk,
        max_len=config.length_limit,
        LOG=config.score == "logprob",
        ROWS=rows,
        COLUMNS=next_power_of_2(num_nodes),
    )


def _build_tree(tree: VerifyInput, candidates: Candidates, roots: RootTables, config: SpecConfig) -> None:
    num_nodes = config.num_draft_tokens
    if num_nodes <= _SMALL_NODES and config.num_candidates <= _SMALL_CANDIDATES:
        _build_small_tree(tree, candidates, roots, config)
    else:
        chosen = select(candidates.scores, num_nodes - 1, num_alive(roots, config))
        write_nodes(tree, candidates, chosen, roots, config)
        write_links(tree, roots, config)


def empty_tree(batch_size: int, num_nodes: int, device: torch.device) -> VerifyInput:
    """Allocate trees."""

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
        proposed_depth=table(batch_size, dtype=torch.int32),
    )


def proposed(candidates: Candidates | ExplicitCandidates) -> dict[str, Any]:
    """Make the fields of a VerifyInput that show the candidates, and the distributions of sampled ones."""
    return {"candidates": replace(candidates, draft_prob=None), "draft_prob": candidates.draft_prob}


def build(
    candidates: Candidates | ExplicitCandidates,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    cache_locations: torch.Tensor,
    config: SpecConfig,
    draft_steps: torch.Tensor | None = None,
    looked_up: ExplicitCandidates | None = None,
    *,
    out: VerifyInput | None = None,
) -> VerifyInput:
    """Build each request's tree of its N-1 best candidates, or of all in a chain or of sampled drafts.

    looked_up: candidates in place of the others, for the requests that have some.

    draft_steps: i32 [B], the tree is chosen among candidates of at most that depth; None: num_steps. Where there are
    fewer than N-1, the tree's last nodes are dead. cache_locations: i64 [B, N], slot of column L + j. A node at or
    beyond max_len loses its slot. A node with a malformed parent gets the root as parent; `check` finds it.
    """
    require_contiguous(**candidates.tensors)
    require_contiguous(bonus_tokens=bonus_tokens, seq_lens=seq_lens, cache_locations=cache_locations)
    empty = out or empty_tree(len(bonus_tokens), config.num_draft_tokens, bonus_tokens.device)
    tree = replace(empty, **proposed(candidates), looked_up=looked_up)
    if draft_steps is None:
        draft_steps = torch.full_like(bonus_tokens, config.num_steps)
    require_contiguous(draft_steps=draft_steps)
    roots = RootTables(bonus_tokens, seq_lens, cache_locations, draft_steps)
    if isinstance(candidates, ExplicitCandidates):
        write_explicit_nodes(tree, candidates, roots, config)
        write_links(tree, roots, config)
    else:
        lay_out = _build_lanes if config.topk == 1 or config.is_sampled else _build_tree
        lay_out(tree, candidates, roots, config)
    if looked_up is not None:
        write_explicit_nodes(tree, looked_up, roots, config, skips_empty=True)
        write_links(tree, roots, config)
    return tree
