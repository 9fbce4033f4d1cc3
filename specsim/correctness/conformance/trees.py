"""Cases of trees: their building, with every mask layout and malformed lists, and attention over their nodes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specsim.core.pool import KVBuffer, KVLayout
from specsim.correctness.conformance.contract import Call, KernelCase, arguments, integers, replaced, strided
from specsim.correctness.conformance.drafting import chosen, drafted

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
    mask_BNN = torch.stack(list(map(visibility, grown))) if batch else torch.empty(0, num_nodes, num_nodes).bool()
    all_links = list(map(links, grown))
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
    by_node = is_well_formed.repeat_interleave(num_nodes)
    return replace(call, rows={"tree_mask": by_entry, "positions": by_node, **tables})


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

_BUILD = (
    *_sizes(),
    KernelCase("build_tree", "33 nodes, mask of the tree", partial(_grown, 2, 5, 3, 33, QLEN_ONLY)),
    KernelCase("build_tree", "65 nodes, full mask", partial(_grown, 2, 8, 3, 65, FULL_MASK)),
    KernelCase("build_tree", "ties", partial(_grown, 4, 4, 3, 12, FULL_MASK, coarse=True)),
    *_refusable(),
    *(
        KernelCase("build_tree", f"malformed: {name}", partial(_damaged, damage), may_refuse=True)
        for name, damage in _MALFORMED.items()
    ),
)


_EPS = 2.0**-23


def attention_call(
    seq_lens: list[int], k: int, num_steps: int, num_nodes: int, heads: tuple[int, int], dim: int, mode: int
) -> Call:
    """Make one call.

    heads: of queries and of keys. Slots lie anywhere in the buffer; unread ones hold NaN.
    """
    from specsim.reference.attention import AttentionMetadata, Keys, attention
    from specsim.reference.tree import parents_of, visibility

    generator = torch.Generator().manual_seed(num_nodes)
    batch = len(seq_lens)
    draft_loop = drafted(batch, k, num_steps, seed=num_nodes)
    rows = zip(chosen(draft_loop, num_nodes).tolist(), draft_loop.parent_list.tolist(), strict=True)
    masks = [visibility(parents_of(*row, k)) for row in rows]
    mask_BNN = torch.stack(masks) if masks else torch.empty(0, num_nodes, num_nodes, dtype=torch.bool)
    ends = torch.nn.functional.pad((integers(seq_lens) + num_nodes).cumsum(0), (1, 0))
    indices = torch.randperm(int(ends[-1]) + 9, generator=generator)[: int(ends[-1])]
    kv = KVBuffer(KVLayout(1, heads[1], dim), int(ends[-1]) + 9, torch.float32)
    for buffer in (kv.keys, kv.values):
        buffer.fill_(float("nan"))
        buffer[0, indices] = torch.randn(len(indices), heads[1], dim, generator=generator)
    query = torch.randn(batch * num_nodes, heads[0], dim, generator=generator)
    keys = tuple(
        Keys(slots, torch.arange(len(slots)), torch.nn.functional.pad(mask, (len(slots) - num_nodes, 0), value=True))
        for slots, mask in zip(indices.split(ends.diff().tolist()), mask_BNN, strict=False)
    )
    exact = KVBuffer(KVLayout(1, heads[1], dim), len(kv.keys[0]), torch.float64)
    exact.copy_(kv)
    slots = torch.zeros(batch * num_nodes, dtype=torch.int64)
    out = attention(query.double(), 0, exact, AttentionMetadata(slots, slots, keys), None).float()
    packed = tree_mask(mask_BNN, integers(seq_lens), mode)
    blank = torch.full_like(query, float("nan"))
    values = query, kv.keys[0], kv.values[0], blank, ends.int(), indices, packed, mode, num_nodes
    return Call(
        arguments("tree_attention", *values),
        {"o": out},
        tolerance=_budget(query, kv, max(seq_lens, default=0) + num_nodes),
    )


def _budget(query: torch.Tensor, kv: KVBuffer, columns: int) -> float:
    """Bound float32 rounding: a logit sums D products, its weight is an exponential, the output sums columns."""
    keys = kv.keys.nan_to_num(0)
    values = kv.values.nan_to_num(0)
    if not query.numel():
        return _EPS
    dim = query.shape[-1]
    logit = float(query.abs().max() * keys.abs().max()) * dim**0.5
    return 2 * _EPS * (dim * logit + columns + 8) * float(values.abs().max())


_SHAPES = {
    "a prefix of no tokens": ([0], 2, 2, 5, (2, 2), 8),
    "unequal prefixes": ([7, 0, 33], 3, 3, 8, (4, 2), 16),
    "17 nodes, four heads a group": ([65, 3], 4, 3, 17, (4, 1), 16),
    "32 nodes": ([9], 5, 3, 32, (2, 1), 8),
    "a chain": ([5, 12], 1, 4, 5, (2, 1), 8),
    "no requests": ([], 2, 2, 5, (2, 2), 8),
}

_ATTENTION = (
    *(
        KernelCase("tree_attention", f"{name}, {layout}", partial(attention_call, *shape, mode))
        for name, shape in _SHAPES.items()
        for layout, mode in _MODES.items()
    ),
    KernelCase(
        "tree_attention", "33 nodes, mask of the tree", partial(attention_call, [9], 5, 3, 33, (2, 1), 8, QLEN_ONLY)
    ),
)

CASES = (*_BUILD, *_ATTENTION)
