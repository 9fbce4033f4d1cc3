"""Depths, mask and first-child / next-sibling arrays of a verify tree, from its parents.

A dead node, which has no parent and is not the root, gets no depth, mask, links or slot.
"""

from typing import no_type_check

import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import VerifyInput
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel
from specsim.fast.tree_parents import Roots, TreeTables

_ROWS = 32
_COLUMNS = 64


@triton.jit
@no_type_check
def store_links(tree_ptrs, own, first_child, next_sibling, position, slot, num_nodes, max_len, mask):
    """Store links, positions and slots of nodes, with -1 for a link to node num_nodes or beyond."""
    child = tl.where(first_child < num_nodes, first_child, -1)
    sibling = tl.where(next_sibling < num_nodes, next_sibling, -1)
    tl.store(tree_ptrs.positions_ptr + own, position, mask=mask)
    tl.store(tree_ptrs.retrieve_index_ptr + own, own, mask=mask)
    tl.store(tree_ptrs.next_token_ptr + own, child.to(tl.int64), mask=mask)
    tl.store(tree_ptrs.next_sibling_ptr + own, sibling.to(tl.int64), mask=mask)
    tl.store(tree_ptrs.cache_locations_ptr + own, tl.where(position < max_len, slot, -1), mask=mask)


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
    own = first + node
    parent = tl.load(tree_ptrs.parents_ptr + own, mask=mask, other=-1)
    is_live = mask & ((node == 0) | (parent >= 0))
    first_child = tl.zeros_like(node) + num_nodes
    next_sibling = tl.zeros_like(node) + num_nodes
    for start in range(0, num_nodes, COLUMNS):
        other = start + tl.arange(0, COLUMNS)[None, :]
        mask_other = other < num_nodes
        tl.store(tree_ptrs.mask_ptr + own * num_nodes + other, (other == node) & is_live, mask=mask & mask_other)
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
        tl.store(tree_ptrs.mask_ptr + own * num_nodes + ancestor, True, mask=is_live)
    position = tl.where(is_live, tl.load(root_ptrs.seq_lens_ptr + request) + depth, 0)
    slot = tl.load(root_ptrs.cache_locations_ptr + own, mask=is_live, other=-1)
    store_links(tree_ptrs, own, first_child, next_sibling, position, slot, num_nodes, max_len, mask)


def write_links(tree: VerifyInput, roots: Roots, config: SpecConfig) -> None:
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
