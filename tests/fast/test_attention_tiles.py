"""Attention kernels see the keys of the reference and compute its result."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from specsim.core.config import SpecConfig
from specsim.core.kv_buffer import KVFormat
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.fast import attention as fast
from specsim.fast.drafting import lanes as fast_lanes
from specsim.fast.model import attention_plan
from specsim.fast.model import metadata as made
from specsim.reference.attention import (
    AttentionMetadata,
    Scores,
    attention,
    extend_metadata,
    lane_metadata,
    prefill_metadata,
    tree_metadata,
)

from ..operations.trees import make_batch, seen, tree_batch


def padded(rows: list[int], lengths: list[int], device: str) -> Batch:
    return make_batch([*rows, -1], [*lengths, 0]).to(device)


def twin(pools: KVPool, dtype: torch.dtype, device: str) -> KVPool:
    """Copy the pool for kernels."""
    layers, slots, heads, dim = pools.draft.keys.shape
    buffers = [KVBuffer(KVLayout(layers, heads, dim), slots, dtype, device) for _ in range(2)]
    other = KVPool(*buffers, pools.page_size, *pools.token_ids.shape)
    other.copy_(pools)
    return other


@dataclass(frozen=True)
class Phase:
    """Metadata of one forward by the reference, its pool, and a function for the kernels' metadata of another pool."""

    expected: AttentionMetadata
    pools: KVPool
    build: Callable[[KVPool, str], made.AttentionMetadata]


def random_parents(num_nodes: int) -> list[int]:
    return [-1] + [int(torch.randint(node, ())) for node in range(1, num_nodes)]


def tree_phase(shuffled_pools, num_nodes: int, page_size: int, max_len: int = 100, layout=None) -> Phase:
    lengths = [5, 8, 1]
    pools, rows = shuffled_pools(page_size, [length + num_nodes for length in lengths], layout)
    parents = [random_parents(num_nodes) for _ in lengths]
    locations = torch.cat([pools.req_to_token[r, n : n + num_nodes] for r, n in zip(rows, lengths, strict=True)])
    tree = tree_batch(parents, lengths, locations=locations)
    tree = replace(tree, cache_locations=torch.where(tree.positions < max_len, locations, -1))
    none = torch.full((num_nodes,), -1)
    more = tree_batch([*parents, parents[0]], [*lengths, 0], locations=torch.cat([tree.cache_locations, none]))
    return Phase(
        tree_metadata(make_batch(rows, lengths), tree, pools),
        pools,
        lambda other, device: made.tree_metadata(padded(rows, lengths, device), more.to(device), other),
    )


def prefill_phase(shuffled_pools, starts: list[int], counts: list[int], page_size: int, layout=None) -> Phase:
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    pools, rows = shuffled_pools(page_size, lengths, layout)
    row_starts = torch.tensor([0, *counts]).cumsum(0)
    ids, none = torch.zeros(sum(counts), dtype=torch.int64), torch.full((len(rows),), -1)
    prefill = PrefillInput(ids, row_starts, torch.tensor(starts), none)
    batch = make_batch(rows, lengths)
    return Phase(
        prefill_metadata(batch, prefill, pools),
        pools,
        lambda other, device: made.prefill_metadata(batch.to(device), prefill.to(device), other),
    )


def extend_phase(shuffled_pools, num_written: list[int], width: int, page_size: int, layout=None) -> Phase:
    """Make draft-extend, where rows of a request from num_written on have no slot."""
    lengths = [5, 8, 1][: len(num_written)]
    pools, rows = shuffled_pools(page_size, [length + width for length in lengths], layout)
    slots = torch.stack([pools.req_to_token[r, n : n + width] for r, n in zip(rows, lengths, strict=True)])
    slots = torch.where(torch.arange(width) < torch.tensor(num_written)[:, None], slots, -1)

    def rows_of(batch: Batch, slots_R: torch.Tensor) -> DraftExtendInput:
        ids = torch.zeros_like(slots_R)
        return DraftExtendInput(
            row_starts=torch.arange(0, len(ids) + 1, width), hidden=ids, input_ids=ids, positions=ids,
            cache_locations=slots_R, num_accepted_drafts=ids, num_accepted_tokens=ids, bonus_tokens=ids,
            seq_lens=batch.seq_lens, req_pool_indices=batch.req_pool_indices,
        )  # fmt: skip

    batch, more = make_batch(rows, lengths), padded(rows, lengths, "cpu")
    more_slots = torch.cat([slots.flatten(), torch.full((width,), -1)])
    return Phase(
        extend_metadata(batch, rows_of(batch, slots.flatten()), pools),
        pools,
        lambda other, device: made.extend_metadata(more.to(device), rows_of(more, more_slots).to(device), other),
    )


def lane_phase(
    shuffled_pools, topk: int, num_steps: int, step: int, page_size: int, draft_kv: str, max_len: int = 100, layout=None
) -> Phase:
    """Make a draft step, with lanes in its path at every step, even later ones that must not be read."""
    lengths, num_nodes = [7, 8, 17], num_steps + 1 if topk == 1 else topk + 1
    config = SpecConfig(topk, num_steps, num_nodes, page_size, draft_kv=draft_kv, max_len=max_len)
    pools, rows = shuffled_pools(page_size, [length + config.need + page_size for length in lengths], layout)
    own = torch.arange(topk)[:, None].expand(4, -1, num_steps)
    path = torch.randint(topk, own.shape) if draft_kv == "ancestor" else own.clone()
    path[:, :, step] = own[:, :, step]
    state = SimpleNamespace(step=torch.tensor([step], dtype=torch.int32), path=path.int())
    return Phase(
        lane_metadata(make_batch(rows, lengths), path[:3, :, : step + 1], config, pools),
        pools,
        lambda other, device: fast_lanes.lane_metadata(
            padded(rows, lengths, device),
            SimpleNamespace(step=state.step.to(device), path=state.path.to(device)),
            config,
            other,
        ),
    )


def seen_by_kernels(metadata: made.AttentionMetadata) -> list[list[tuple[int, int]]]:
    """List the same as `seen`, from the tensors."""
    rows = []
    for request, (low, high) in enumerate(itertools.pairwise(metadata.row_starts.tolist())):
        column_slots = metadata.table[metadata.table_rows[request]].tolist()
        slots, places = metadata.extra_slots[request].tolist(), metadata.extra_positions[request].tolist()
        key_len = int(metadata.key_lens[request])
        for row in range(low, high):
            words, prefix_len = metadata.visible[row].tolist(), int(metadata.prefix_lens[row])
            assert prefix_len in ({0, key_len} if not metadata.is_causal else range(key_len + 1))
            keys = [(column_slots[c], c) for c in range(prefix_len)]
            extras = range(int(metadata.num_extras[request]))
            keys += [(slots[e], places[e]) for e in extras if words[e // 32] >> e % 32 & 1]
            rows.append(sorted(key for key in keys if key[0] >= 0))
    return rows


TREES = [(1, 1), (2, 4), (7, 1), (32, 4), (33, 16), (64, 1)]


PHASES = {
    **{f"tree of {nodes}, pages of {size}": (tree_phase, nodes, size) for nodes, size in TREES},
    "tree at the length limit": (tree_phase, 9, 4, 9),
    "ragged prefill": (prefill_phase, [0, 5, 8, 3], [6, 1, 3, 17], 4),
    "prefill of one token": (prefill_phase, [0], [1], 1),
    "prefill in two blocks": (prefill_phase, [2, 0], [65, 40], 16),
    "draft-extend": (extend_phase, [4, 4, 4], 4, 4),
    "draft-extend with rows that write nothing": (extend_phase, [1, 4, 0], 4, 1),
    "draft-extend of one row": (extend_phase, [1, 1], 1, 16),
    **{
        f"{mode} {k} x {s}, step {i}, pages of {p}": (lane_phase, k, s, i, p, mode)
        for k, s, i, p, mode in [
            (1, 4, 0, 1, "lane"), (1, 4, 3, 4, "lane"), (3, 4, 0, 4, "lane"), (3, 4, 2, 1, "lane"),
            (3, 4, 1, 4, "ancestor"), (3, 4, 3, 16, "ancestor"), (5, 2, 1, 5, "ancestor"), (8, 5, 3, 1, "ancestor"),
        ]
    },
    "lanes at the length limit": (lane_phase, 3, 4, 1, 4, "lane", 9),
    "lanes beyond the length limit": (lane_phase, 2, 4, 2, 1, "ancestor", 9),
}  # fmt: skip


@pytest.mark.parametrize("phase", PHASES.values(), ids=PHASES)
def test_kernels_see_what_the_reference_sees(shuffled_pools, phase, device, program_order):
    make, *arguments = phase
    phase = make(shuffled_pools, *arguments)
    metadata = phase.build(twin(phase.pools, torch.float32, device), device)
    rows, expected = len(phase.expected.slots), seen(phase.expected)
    assert seen_by_kernels(metadata) == expected + [[]] * (len(metadata.slots) - rows)
    assert metadata.max_rows == max(len(keys.mask) for keys in phase.expected.keys)
    assert metadata.slots.tolist() == phase.expected.slots.tolist() + [-1] * (len(metadata.slots) - rows)
    live = phase.expected.slots >= 0
    positions = torch.where(live, phase.expected.positions, 0).tolist()
    assert metadata.positions.tolist() == positions + [0] * (len(metadata.slots) - rows)
    for tensor in (metadata.extra_slots, metadata.extra_positions):
        assert (tensor < 2**31 - 1).all()  # no entry is unwritten


def fill_for(phase: Phase, layer: int, window: int | None, dtype: torch.dtype, first_columns: int = 0) -> None:
    """Write random KV of that type to the slots that some row sees, and NaN to all others."""
    kv = phase.pools.draft
    start = 0
    kv.keys.fill_(math.nan)
    kv.values.fill_(math.nan)
    for keys in phase.expected.keys:
        rows = phase.expected.positions[start : (start := start + len(keys.mask)), None]
        in_window = window is None or (rows - keys.positions < window) | (keys.positions < first_columns)
        mask = keys.mask & in_window
        slots = keys.slots[mask.any(0)]
        for buffer in (kv.keys, kv.values):
            buffer[layer, slots] = torch.randn(len(slots), *buffer.shape[2:]).to(dtype).double()


def budget(query_RAD: torch.Tensor, phase: Phase, dtype: torch.dtype) -> float:
    """Bound the error of an element, from the float64 inputs.

    In f32, products of queries and keys are off by a few units of |q||k|/√D, weights by twice that, and the sum by a
    unit for each key. Weights that are rounded to `dtype` before the product with the values, and the output, each add
    a unit of it.
    """
    keys, values = phase.pools.draft.keys.nan_to_num(), phase.pools.draft.values.nan_to_num()
    length = query_RAD.double().norm(dim=-1).max() * keys.norm(dim=-1).max() / query_RAD.shape[-1] ** 0.5
    single, narrow = torch.finfo(torch.float32).eps, torch.finfo(dtype).eps
    num_keys = max((keys.mask.shape[1] for keys in phase.expected.keys), default=0)
    return float(values.abs().max() * (single * (4 * length + num_keys + 8) + narrow))


# Phase, heads, key heads, head dim, window, first columns if there are any.
ATTENDED = {
    "tree, no grouping": (tree_phase, (33, 4), 2, 2, 16, None),
    "tree, head dim 80": (tree_phase, (64, 1), 2, 1, 80, 3),
    "tree at the limit, groups of 3": (tree_phase, (9, 4, 9), 6, 2, 10, None),
    "tree, window at the prefix's end": (tree_phase, (7, 1), 4, 1, 16, 5),
    "prefill, head dim 64": (prefill_phase, ([0, 5, 8, 3], [6, 1, 3, 17], 4), 4, 2, 64, None),
    "prefill, several tiles of keys": (prefill_phase, ([130, 0], [9, 40], 16), 2, 2, 16, None),
    "prefill, window in the first tile": (prefill_phase, ([130, 0], [9, 40], 16), 2, 2, 16, 7),
    "prefill, window over the tile's edge": (prefill_phase, ([125], [9], 16), 3, 1, 16, 6),
    "prefill, window of one": (prefill_phase, ([125], [9], 1), 3, 1, 2, 1),
    "draft-extend with junk": (extend_phase, ([1, 4, 0], 4, 4), 4, 2, 16, None),
    "lanes": (lane_phase, (3, 4, 3, 4, "lane"), 4, 2, 16, None),
    "ancestors in a window": (lane_phase, (8, 5, 3, 16, "ancestor"), 4, 2, 16, 4),
    "one lane in a window": (lane_phase, (1, 4, 2, 16, "lane"), 4, 1, 16, 18),
    "lanes at the limit": (lane_phase, (3, 4, 1, 4, "lane", 9), 2, 1, 16, None),
    "tree, first columns and a window": (tree_phase, (7, 1), 4, 1, 16, 2, 3),
    "prefill, first columns far away": (prefill_phase, ([700, 0], [9, 40], 16), 2, 2, 16, 7, 3),
    "prefill, first columns in two tiles": (prefill_phase, ([700], [3], 16), 3, 1, 16, 150, 130),
    "prefill, first columns at the window": (prefill_phase, ([125], [9], 1), 3, 1, 2, 100, 31),
    "draft-extend with junk and first columns": (extend_phase, ([1, 4, 0], 4, 4), 4, 2, 16, 2, 1),
    "ancestors, first columns and a window": (lane_phase, (8, 5, 3, 16, "ancestor"), 4, 2, 16, 4, 2),
}


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attended", ATTENDED.values(), ids=ATTENDED)
def test_attention_of_kernels_equals_the_references(shuffled_pools, attended, dtype, splits, device, program_order):
    """Slots that no row sees hold NaN.

    A padded request has NaN queries and gives zeros, as dropped rows do.
    """
    make, arguments, heads, kv_heads, dim, window, first = (*attended, 0)[:7]
    phase = make(shuffled_pools, *arguments, layout=KVLayout(2, kv_heads, dim))
    fill_for(phase, 1, window, dtype, first)
    pools = twin(phase.pools, dtype, device)
    metadata = phase.build(pools, device)
    query = torch.randn(len(phase.expected.slots), heads, dim).to(dtype)
    more = torch.full((len(metadata.slots), heads, dim), math.nan, dtype=dtype)
    more[: len(query)] = query
    expected = attention(query.double(), 1, phase.pools.draft, phase.expected, Scores(window, first_columns=first))
    scores = fast.Scores(window, first_columns=first)
    out = fast.attention(more.to(device), 1, pools.draft, metadata, scores, splits=splits).cpu()
    assert out.dtype == dtype
    assert (out[: len(query)].double() - expected).abs().max() <= budget(query, phase, dtype)
    assert (out[: len(query)][phase.expected.slots < 0] == 0).all()
    assert (out[len(query) :] == 0).all()


def softmax_with_sinks(query_RAD, phase: Phase, dim: int, scale: float, window: int | None, sinks_A) -> torch.Tensor:
    """Compute attention in float64 from the keys that rows see, whose first `dim` channels are values."""
    rows, start = [], 0
    key_SAD = phase.pools.draft.keys[1]
    for keys in phase.expected.keys:
        places = phase.expected.positions[start : (start := start + len(keys.mask))]
        for offset, (visible, place) in enumerate(zip(keys.mask, places, strict=True)):
            query_AD = query_RAD[start - len(keys.mask) + offset].double()
            kept = visible if window is None else visible & (place - keys.positions < window)
            key_CAD = key_SAD[keys.slots[kept]].repeat_interleave(len(query_AD) // key_SAD.shape[1], dim=1)
            logits = scale * torch.einsum("ad,cad->ac", query_AD, key_CAD)
            weights = torch.cat([logits, sinks_A.double()[:, None]], dim=1).softmax(-1)[:, :-1]
            rows.append(torch.einsum("ac,cad->ad", weights, key_CAD[..., :dim]))
    return torch.stack(rows)


# Phase, query heads, channels of values, other channels of keys, window.
LATENT = {
    "tree, 16 and 8 channels": (tree_phase, (33, 4), 4, 16, 8, None),
    "tree in a window, 20 and 4 channels": (tree_phase, (7, 1), 6, 20, 4, 5),
    "prefill, several tiles of keys": (prefill_phase, ([130, 0], [9, 40], 16), 3, 32, 16, None),
    "draft-extend, rows that write nothing": (extend_phase, ([1, 4, 0], 4, 1), 2, 16, 2, None),
    "lanes in a window": (lane_phase, (3, 4, 2, 1, "lane"), 4, 16, 8, 4),
}


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("attended", LATENT.values(), ids=LATENT)
def test_latent_keys_and_sinks_are_attended_as_written(shuffled_pools, attended, has_sinks, splits, device):
    """Values are the first channels of the keys: the buffer of values holds NaN."""
    make, arguments, heads, dim, turned, window = attended
    phase = make(shuffled_pools, *arguments, layout=KVLayout(2, 1, dim + turned))
    fill_for(phase, 1, window, torch.float32)
    sinks = torch.randn(heads) * 3 if has_sinks else torch.full((heads,), -math.inf)
    pools = twin(phase.pools, torch.float32, device)
    pools.draft.values.fill_(math.nan)
    metadata = phase.build(pools, device)
    query = torch.randn(len(metadata.slots), heads, dim + turned)
    scores = fast.Scores(window, sinks.to(device) if has_sinks else None, 0.3, turned)
    out = fast.attention(query.to(device), 1, pools.draft, metadata, scores, splits=splits).cpu()
    expected = softmax_with_sinks(query, phase, dim, 0.3, window, sinks).nan_to_num()
    assert out.shape == (*query.shape[:2], dim)
    assert (out[: len(expected)].double() - expected).abs().max() <= 4 * budget(query, phase, torch.float32)
    assert (out[len(expected) :] == 0).all()


@pytest.mark.parametrize("splits", [None, 3])
def test_sinks_take_their_share_of_grouped_heads(shuffled_pools, splits, device):
    phase = prefill_phase(shuffled_pools, [130, 0, 3], [9, 4, 1], 16, layout=KVLayout(2, 2, 16))
    fill_for(phase, 1, None, torch.float32)
    phase.pools.draft.values.copy_(phase.pools.draft.keys)
    pools, sinks = twin(phase.pools, torch.float32, device), torch.tensor([-math.inf, 0.0, 2.0, 5.0])
    metadata = phase.build(pools, device)
    query = torch.randn(len(metadata.slots), 4, 16)
    scores = fast.Scores(sinks=sinks.to(device))
    out = fast.attention(query.to(device), 1, pools.draft, metadata, scores, splits=splits).cpu()
    expected = softmax_with_sinks(query, phase, 16, 0.25, None, sinks)
    assert (out[: len(expected)].double() - expected).abs().max() <= budget(query, phase, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [None, 3])
def test_fp8_kv_is_read_times_its_scales(shuffled_pools, splits, dtype, device):
    """The reference reads the same numbers in float64."""
    layout = KVLayout(2, 2, 16)
    phase = prefill_phase(shuffled_pools, [130, 0, 3], [9, 4, 1], 16, layout=layout)
    fill_for(phase, 1, None, torch.float32)
    kv = phase.pools.draft
    stored = KVBuffer(layout, kv.keys.shape[1], dtype, device, KVFormat("fp8_e4m3", 0.5, 0.3))
    assert stored.is_fp8
    for own, other, scale in ((kv.keys, stored.keys, 0.5), (kv.values, stored.values, 0.3)):
        other.copy_(own / scale)
        own.copy_(other.cpu().double() * scale)
    pools = KVPool(stored, stored, phase.pools.page_size, *phase.pools.token_ids.shape)
    for name in ("req_to_token", "token_ids"):
        getattr(pools, name).copy_(getattr(phase.pools, name))
    metadata = phase.build(pools, device)
    query = torch.randn(len(metadata.slots), 4, 16).to(dtype)
    out = fast.attention(query.to(device), 1, stored, metadata, None, splits=splits).cpu()
    expected = attention(query.double(), 1, kv, phase.expected, None)
    assert (out[: len(expected)].double() - expected).abs().max() <= 2 * budget(query, phase, dtype)


@pytest.mark.parametrize("length", [1.0, 100.0])
@pytest.mark.parametrize("splits", [2, 5, 9])
def test_keys_read_in_parts_are_merged_in_their_order(shuffled_pools, splits, length, device, program_order):
    """Prefixes have no key, less than a tile, several tiles, or more parts than tiles.

    The bits are the same every time.

    length: of queries. With a long one the parts' largest logits differ from 0 by more than the exponents of an f32.
    """
    phase = prefill_phase(shuffled_pools, [300, 0, 20], [3, 2, 1], 16, layout=KVLayout(1, 2, 16))
    fill_for(phase, 0, None, torch.float32)
    pools, query = twin(phase.pools, torch.float32, device), length * torch.randn(6, 4, 16, device=device)
    metadata = phase.build(pools, device)
    query = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, len(metadata.slots) - 6))
    out, again = (fast.attention(query, 0, pools.draft, metadata, None, splits=splits) for _ in range(2))
    expected = attention(query[:6].cpu().double(), 0, phase.pools.draft, phase.expected, None)
    assert torch.equal(out, again)
    assert (out[:6].cpu().double() - expected).abs().max() <= budget(query[:6].cpu(), phase, torch.float32)


@pytest.mark.parametrize("multiprocessors", [1, 7, 40])
def test_requests_are_read_in_parts_by_their_lengths(
    shuffled_pools, multiprocessors, device, monkeypatch, program_order
):
    """The parts suit a device of that size: a long request has several of them, other requests one."""
    monkeypatch.setattr(attention_plan, "_multiprocessors", lambda _: multiprocessors)
    phase = prefill_phase(shuffled_pools, [700, 0, 20, 200], [3, 2, 1, 40], 16, layout=KVLayout(1, 2, 16))
    fill_for(phase, 0, None, torch.float32)
    pools, query = twin(phase.pools, torch.float32, device), torch.randn(46, 4, 16, device=device)
    out, again = (fast.attention(query, 0, pools.draft, phase.build(pools, device), None) for _ in range(2))
    expected = attention(query.cpu().double(), 0, phase.pools.draft, phase.expected, None)
    assert torch.equal(out, again)
    assert (out.cpu().double() - expected).abs().max() <= budget(query.cpu(), phase, torch.float32)


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("counts", [[1, 70, 5, 3], [4, 4, 4, 4]], ids=["prefill", "draft-extend"])
def test_an_invariant_result_is_bitwise_equal_solo_and_batched(shuffled_pools, counts, window, device):
    """Requests of many and few keys are run solo and batched."""
    starts, counts = torch.tensor([600, 0, 1100, 37]), torch.tensor(counts)
    pools, rows = shuffled_pools(16, (starts + counts).tolist(), KVLayout(1, 2, 16))
    pools.draft.keys.normal_()
    pools.draft.values.normal_()
    other, rows = twin(pools, torch.float32, device), torch.tensor(rows)
    query = torch.randn(int(counts.sum()), 4, 16, device=device)

    def attend(query: torch.Tensor, chosen: slice) -> torch.Tensor:
        row_starts, none = torch.nn.functional.pad(counts[chosen].cumsum(0), (1, 0)), torch.full((4,), -1)
        prefill = PrefillInput(torch.zeros(len(query), dtype=torch.int64), row_starts, starts[chosen], none[chosen])
        batch = make_batch(rows[chosen].tolist(), (starts + counts)[chosen].tolist()).to(device)
        metadata = made.prefill_metadata(batch, prefill.to(device), other)
        metadata = replace(metadata, has_equal_rows=len(set(counts.tolist())) == 1)
        return fast.attention(query, 0, other.draft, metadata, fast.Scores(window), invariant=True)

    together, lows = attend(query, slice(None)), [0, *counts.cumsum(0).tolist()]
    for request, (low, high) in enumerate(itertools.pairwise(lows)):
        assert torch.equal(attend(query[low:high], slice(request, request + 1)), together[low:high])


def test_a_padded_request_changes_no_bit_of_the_others(shuffled_pools, device):
    """Without it there are no rows after the others that a block of rows would reach."""
    phase = tree_phase(shuffled_pools, 9, 4, layout=KVLayout(1, 2, 16))
    fill_for(phase, 0, None, torch.float32)
    pools, query = twin(phase.pools, torch.float32, device), torch.randn(36, 4, 16, device=device)
    metadata = phase.build(pools, device)
    by_row = {name: getattr(metadata, name)[:27] for name in ("positions", "prefix_lens", "visible")}
    alone = replace(metadata, row_starts=metadata.row_starts[:4], num_extras=metadata.num_extras[:3], **by_row)
    out, buffer = fast.attention(query, 0, pools.draft, metadata, None), torch.empty(36, 4, 16, device=device)
    assert fast.attention(query, 0, pools.draft, alone, None, out=buffer) is buffer
    assert torch.equal(out[:27], buffer[:27])
    assert buffer[27:].isnan().all()


def test_queries_may_have_another_type_than_the_cache(shuffled_pools, device):
    phase = tree_phase(shuffled_pools, 9, 4, layout=KVLayout(1, 2, 16))
    fill_for(phase, 0, None, torch.bfloat16)
    pools, query = twin(phase.pools, torch.bfloat16, device), torch.randn(36, 4, 16)
    out = fast.attention(query.to(device), 0, pools.draft, phase.build(pools, device), None).cpu()
    expected = attention(query[:27].double(), 0, phase.pools.draft, phase.expected, None)
    assert (out[:27].double() - expected).abs().max() <= budget(query, phase, torch.float32)


def test_attention_of_kernels_wants_contiguous_queries(shuffled_pools, device):
    phase = tree_phase(shuffled_pools, 2, 1)
    pools = twin(phase.pools, torch.float32, device)
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        fast.attention(torch.empty(8, 2, 4, device=device)[..., ::2], 0, pools.draft, phase.build(pools, device), None)


def test_kernels_take_no_requests(shuffled_pools, device):
    pools, nobody = twin(shuffled_pools(4, [1])[0], torch.float32, device), make_batch([], []).to(device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    tree = tree_batch([[-1, 0]], [0], locations=torch.zeros(2, dtype=torch.int64)).to(device)
    tree = replace(tree, **{name: tensor[:0] for name, tensor in tree.tensors.items()})
    prefill = PrefillInput(none, torch.zeros(1, dtype=torch.int64, device=device), none, none)
    lanes = SimpleNamespace(step=torch.zeros(1, dtype=torch.int32, device=device), path=none.view(0, 3, 4).int())
    for metadata in (
        made.tree_metadata(nobody, tree, pools),
        made.prefill_metadata(nobody, prefill, pools),
        fast_lanes.lane_metadata(nobody, lanes, SpecConfig(3, 4, 8, max_len=100), pools),
    ):
        assert metadata.positions.shape == metadata.slots.shape == (0,)
        query = torch.empty(0, 1, 2, device=device)
        assert fast.attention(query, 0, pools.target, metadata, None).shape == (0, 1, 2)
