"""Cases of tree attention: every mask layout, short and long prefixes, grouped heads, NaN in unread slots."""

from functools import partial

import torch

from specsim.core.pool import KVBuffer, KVLayout
from specsim.correctness.conformance.case import Call, KernelCase, arguments, integers
from specsim.correctness.conformance.pools import chosen, drafted
from specsim.correctness.conformance.trees import FULL_MASK, QLEN_ONLY, QLEN_ONLY_BITPACKING, tree_mask

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
        Keys(
            request_slots,
            torch.arange(len(request_slots)),
            torch.nn.functional.pad(mask, (len(request_slots) - num_nodes, 0), value=True),
        )
        for request_slots, mask in zip(indices.split(ends.diff().tolist()), mask_BNN, strict=False)
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
    "a chain": ([5, 12], 1, 4, 5, (2, 1), 8),
    "no requests": ([], 2, 2, 5, (2, 2), 8),
}
_MODES = {"full mask": FULL_MASK, "mask of the tree": QLEN_ONLY, "packed mask": QLEN_ONLY_BITPACKING}

CASES = tuple(
    KernelCase("tree_attention", f"{name}, {layout}", partial(attention_call, *shape, mode))
    for name, shape in _SHAPES.items()
    for layout, mode in _MODES.items()
)
