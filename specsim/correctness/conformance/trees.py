"""Cases of build_tree: sizes around a word, every mask layout, ties, empty batches, malformed trees."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specsim.correctness.conformance.case import Call, KernelCase, arguments, integers, replaced, strided
from specsim.correctness.conformance.pools import chosen, drafted

FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING = range(3)
_MODES = {"full mask": FULL_MASK, "mask of the tree": QLEN_ONLY, "packed mask": QLEN_ONLY_BITPACKING}
_LENS = (7, 0, 130, 1, 64)
_WORDS = ((8, torch.uint8), (16, torch.uint16), (32, torch.uint32))


def tree_mask(mask_BNN: Tensor, seq_lens: Tensor, mode: int) -> Tensor:
    """Pack the mask in a layout, flat, as the reference does."""
    from specsim.reference.tree import bitpacked_mask, full_mask

    if mode == FULL_MASK:
        return full_mask(mask_BNN, seq_lens)
    if mode == QLEN_ONLY:
        return mask_BNN.flatten()
    packed = bitpacked_mask(mask_BNN).flatten()
    return packed.view(next(word for most, word in _WORDS if mask_BNN.shape[1] <= most))


def tree_call(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    k: int,
    num_steps: int,
    mode: int,
    rows: Sequence[int] = (),
) -> Call:
    """Make one call.

    `rows` are the requests whose tree is well formed, all if empty.
    """
    from specsim.reference.tree import depths_of, links, parents_of, visibility

    batch = len(seq_lens)
    num_nodes = selected_index.shape[1] + 1
    well_formed = list(rows) or list(range(batch))
    parents = {b: parents_of(selected_index[b].tolist(), parent_list[b].tolist(), k, b) for b in well_formed}
    lone = [-1] + [0] * (num_nodes - 1)
    grown = [parents.get(b, lone) for b in range(batch)]
    depths_BN = integers(map(depths_of, grown)).view(batch, num_nodes)
    mask_BNN = (
        torch.stack([visibility(tree_parents) for tree_parents in grown])
        if batch
        else torch.empty(0, num_nodes, num_nodes).bool()
    )
    all_links = [links(tree_parents) for tree_parents in grown]
    mask = tree_mask(mask_BNN, seq_lens, mode)
    table = integers([-1] * batch * num_nodes).view(batch, num_nodes)
    blank = torch.zeros_like(mask.view(torch.uint8)).view(mask.dtype) if mode == QLEN_ONLY_BITPACKING else mask | True
    expected = {
        "tree_mask": mask,
        "positions": (seq_lens[:, None] + depths_BN).flatten(),
        "retrive_index": torch.arange(batch * num_nodes).view(batch, num_nodes),
        "retrive_next_token": integers(first for first, _ in all_links).view(batch, num_nodes),
        "retrive_next_sibling": integers(sibling for _, sibling in all_links).view(batch, num_nodes),
    }
    positions = torch.full((batch * num_nodes,), -7)
    values = parent_list, selected_index, seq_lens, blank, positions, table, table, table, k, num_steps, num_nodes, mode
    call = Call(arguments("build_tree", *values), expected)
    return call if not rows else _only(call, well_formed, batch, num_nodes)


def _only(call: Call, well_formed: list[int], batch: int, num_nodes: int) -> Call:
    """Compare only well-formed requests; in the mask of the tree each has N² entries."""
    is_well_formed = torch.zeros(batch, dtype=torch.bool)
    is_well_formed[well_formed] = True
    tables = dict.fromkeys(("retrive_index", "retrive_next_token", "retrive_next_sibling"), is_well_formed)
    by_entry = is_well_formed.repeat_interleave(num_nodes**2)
    return replace(
        call, rows={"tree_mask": by_entry, "positions": is_well_formed.repeat_interleave(num_nodes), **tables}
    )


def _grown(batch: int, k: int, num_steps: int, num_nodes: int, mode: int, coarse: bool = False) -> Call:
    draft_loop = drafted(batch, k, num_steps, seed=num_nodes, coarse=coarse)
    seq_lens = integers(_LENS[b % len(_LENS)] for b in range(batch))
    return tree_call(draft_loop.parent_list, chosen(draft_loop, num_nodes), seq_lens, k, num_steps, mode)


def _damaged(damage: Callable[[Tensor, Tensor], None]) -> Call:
    """Make three requests, the middle one malformed; the others have to be right."""
    draft_loop = drafted(3, 3, 3, seed=5)
    parent_list = draft_loop.parent_list.clone()
    selected_index = chosen(draft_loop, 8)
    damage(parent_list[1], selected_index[1])
    return tree_call(parent_list, selected_index, integers(_LENS[:3]), 3, 3, QLEN_ONLY, rows=(0, 2))


def _lose_parent(parent_list: Tensor, selected_index: Tensor) -> None:
    """Give nodes a parent candidate that was not selected."""
    selected_index.copy_(integers([0, 1, 2, 3, 4, 5, 20]))
    parent_list[20 // 3] = next(flat for flat in range(3, 12) if flat not in selected_index.tolist())


def _leave_pool(parent_list: Tensor, selected_index: Tensor) -> None:
    """Select a candidate beyond the pool of 3 + 2 · 9."""
    selected_index[-1] = 3 * len(parent_list)


def _close_circle(parent_list: Tensor, selected_index: Tensor) -> None:
    """Make two candidates each other's parent."""
    selected_index.copy_(integers([0, 1, 2, 3, 4, 12, 15]))
    parent_list[12 // 3] = 15
    parent_list[15 // 3] = 12


def _sizes() -> list[KernelCase]:
    shapes = {
        "8 nodes": (5, 4, 3, 8),
        "9 nodes": (3, 4, 3, 9),
        "16 nodes": (2, 4, 3, 16),
        "17 nodes": (2, 4, 4, 17),
        "32 nodes": (2, 5, 3, 32),
        "a chain": (3, 1, 4, 5),
        "one step": (3, 5, 1, 6),
        "two nodes": (1, 2, 2, 2),
        "no requests": (0, 4, 3, 8),
    }
    return [
        KernelCase("build_tree", f"{name}, {layout}", partial(_grown, *shape, mode))
        for name, shape in shapes.items()
        for layout, mode in _MODES.items()
    ]


def _refusable() -> list[KernelCase]:
    def with_strides() -> Call:
        call = _grown(3, 3, 3, 8, QLEN_ONLY)
        return replaced(call, **{name: strided(call.arguments[name]) for name in ("parent_list", "selected_index")})

    def with_int32() -> Call:
        call = _grown(3, 3, 3, 8, QLEN_ONLY)
        return replaced(call, verified_seq_len=call.arguments["verified_seq_len"].int())

    return [
        KernelCase("build_tree", "inputs with gaps between their entries", with_strides, may_refuse=True),
        KernelCase("build_tree", "verified_seq_len in int32", with_int32, may_refuse=True),
    ]


_MALFORMED = {
    "a parent that was not selected": _lose_parent,
    "a candidate outside the pool": _leave_pool,
    "two candidates that are each other's parent": _close_circle,
}

CASES = (
    *_sizes(),
    KernelCase("build_tree", "65 nodes, full mask", partial(_grown, 2, 8, 3, 65, FULL_MASK)),
    KernelCase("build_tree", "ties", partial(_grown, 4, 4, 3, 12, FULL_MASK, coarse=True)),
    *_refusable(),
    *(
        KernelCase("build_tree", f"malformed: {name}", partial(_damaged, damage), may_refuse=True, perilous=True)
        for name, damage in _MALFORMED.items()
    ),
)
