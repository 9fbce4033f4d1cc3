"""Attention over the keys that a forward's metadata names: parts of a request's keys side by side, then merged."""

import functools
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specsim.core.pool import KVBuffer
from specsim.fast.model.metadata import WORD, AttentionMetadata
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    block_of,
    kernel,
    nearest,
    require_contiguous,
    stages_within,
)

MOST_MERGES = 4096  # programs
MANY = 2**30  # more than there are of anything
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _assignment(unit, key_lens_ptr, num_extras_ptr, window, num_requests, share, units, least, most,
                BLOCK_B: tl.constexpr):  # fmt: skip
    """Which part of which request is the unit's: request, part, its number of parts, and where these are kept.

    A request's number of parts goes with its keys: one for every `share` of them, or for more, so that there are no
    more than `units` in all, but at least `least` and at most `most`. Past the last unit: a request that is none.
    """
    offs = tl.arange(0, BLOCK_B)
    mask = offs < num_requests
    length = tl.load(key_lens_ptr + offs, mask=mask, other=0)
    work = tl.minimum(length, window) + tl.load(num_extras_ptr + offs, mask=mask, other=0)
    share = tl.maximum(share, tl.cdiv(tl.sum(work, axis=0), units))
    splits = tl.where(mask, tl.minimum(tl.maximum(work // share, least), most), 0)
    ends = tl.cumsum(splits, axis=0)
    request = tl.sum((ends <= unit).to(tl.int32), axis=0)
    kept = tl.sum(tl.where((offs < request) & (splits > 1), splits, 0), axis=0)
    own = offs == request
    num_splits = tl.sum(tl.where(own, splits, 0), axis=0)
    split = unit - tl.sum(tl.where(own, ends - splits, 0), axis=0)
    return request, split, num_splits, kept, tl.sum(tl.where(own, length, 0), axis=0)


@triton.jit
def _pairs(block, heads, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The block's pairs of a row and a query head of the group: both counted from the block's first row."""
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // GROUP - block * BLOCK_M // GROUP
    return row, row * heads * GROUP + pair % GROUP


@triton.jit
def _read(base_ptr, slot, loaded, stride_slot, DOT: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The keys or values in these slots, zeros where not loaded."""
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = loaded[:, None]
    if D < BLOCK_D:
        mask = mask & (offs_d < D)
    return tl.load(base_ptr + slot.to(tl.int64)[:, None] * stride_slot + offs_d, mask=mask, other=0.0).to(DOT)


@triton.jit
def _fold(total, top, acc, logits, value, scale):
    """One tile of keys into the online softmax; logits, of which `scale` makes powers of two, are -inf where unseen."""
    higher = tl.maximum(top, tl.max(logits, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher * scale)
    weight, kept = tl.exp2(logits * scale - shift[:, None]), tl.exp2(top * scale - shift)
    acc = tl.dot(weight.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return total * kept + tl.sum(weight, axis=1), higher, acc


@triton.jit
def _fold_seen_by_all(total, top, acc, query, keys_ptr, values_ptr, table_ptr, low_tile, high_tile, stride_slot, scale,
                      D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Tiles of the prefix of which every row sees every key."""
    offs_c, end = tl.arange(0, BLOCK_C), high_tile * BLOCK_C
    column = low_tile * BLOCK_C + offs_c
    slot = tl.load(table_ptr + 2 * column, mask=column < end, other=-1)
    for tile in tl.range(low_tile, high_tile, num_stages=STAGES):
        column = (tile + 1) * BLOCK_C + offs_c
        next_slot = tl.load(table_ptr + 2 * column, mask=column < end, other=-1)  # a tile ahead, or keys would wait
        key = _read(keys_ptr, slot, slot >= 0, stride_slot, query.dtype, D, BLOCK_D)
        value = _read(values_ptr, slot, slot >= 0, stride_slot, query.dtype, D, BLOCK_D)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        total, top, acc = _fold(total, top, acc, logits, value, scale)
        slot = next_slot
    return total, top, acc


@triton.jit
def _fold_prefix(total, top, acc, query, keys_ptr, values_ptr, table_ptr, low_tile, high_tile, first, prefix_len, start,
                 end, columns, stride_slot, scale, RAGGED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
                 BLOCK_C: tl.constexpr, STAGES: tl.constexpr):  # fmt: skip
    """Tiles of the prefix: those that every row sees whole, then those at the edges of what rows see."""
    all_from, all_until = start, end
    if RAGGED:
        all_from = tl.max(tl.where(prefix_len > 0, first, 0), axis=0)
        all_until = tl.min(tl.where(prefix_len > 0, prefix_len, columns), axis=0)
    low_whole = tl.minimum(tl.maximum(low_tile, tl.cdiv(all_from, BLOCK_C)), high_tile)
    high_whole = tl.minimum(tl.maximum(low_whole, all_until // BLOCK_C), high_tile)
    total, top, acc = _fold_seen_by_all(
        total, top, acc, query, keys_ptr, values_ptr, table_ptr, low_whole, high_whole, stride_slot, scale,
        D, BLOCK_D, BLOCK_C, STAGES,
    )  # fmt: skip
    for edge in tl.range(low_tile, high_tile - (high_whole - low_whole), num_stages=1):
        tile = edge + tl.where(edge < low_whole, 0, high_whole - low_whole)
        column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        slot = tl.load(table_ptr + 2 * column, mask=(column >= start) & (column < end), other=-1)
        key = _read(keys_ptr, slot, slot >= 0, stride_slot, query.dtype, D, BLOCK_D)
        value = _read(values_ptr, slot, slot >= 0, stride_slot, query.dtype, D, BLOCK_D)
        seen = (slot >= 0)[None, :]
        if RAGGED:
            seen = (column[None, :] >= first[:, None]) & (column[None, :] < prefix_len[:, None])
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        total, top, acc = _fold(total, top, acc, tl.where(seen, logits, float("-inf")), value, scale)
    dropped = prefix_len == 0  # what such a row met in the tiles is not its own
    return tl.where(dropped, 0.0, total), tl.where(dropped, float("-inf"), top), tl.where(dropped[:, None], 0.0, acc)


@triton.jit
def _fold_extras(total, top, acc, query, keys_ptr, values_ptr, slots_ptr, places_ptr, visible_ptr, row, mask, position,
                 low, high, extras, window, stride_slot, scale, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Extra keys low..high, 32 at a time; one that no row sees is not read."""
    num_words, bit = (extras + WORD - 1) // WORD, tl.arange(0, WORD)
    for extra in tl.range(low, high, WORD, num_stages=1):
        bits = tl.load(visible_ptr + row * num_words + extra // WORD, mask=mask, other=0)
        inside = extra + bit < extras
        slot = tl.load(slots_ptr + extra + bit, mask=inside, other=-1)
        place = tl.load(places_ptr + extra + bit, mask=inside, other=0)
        visible = ((bits[:, None] >> bit[None, :]) & 1 != 0) & (slot >= 0)[None, :]
        visible = visible & (position[:, None] - place[None, :] < window)
        loaded = tl.max(visible.to(tl.int32), axis=0) > 0
        key = _read(keys_ptr, slot, loaded, stride_slot, query.dtype, D, BLOCK_D)
        value = _read(values_ptr, slot, loaded, stride_slot, query.dtype, D, BLOCK_D)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        total, top, acc = _fold(total, top, acc, tl.where(visible, logits, float("-inf")), value, scale)
    return total, top, acc


@kernel
def _attention_kernel(
    out_ptr, query_ptr, keys_ptr, values_ptr, positions_ptr, row_starts_ptr, table_ptr, table_rows_ptr,
    prefix_lens_ptr, key_lens_ptr, num_extras_ptr, extra_slots_ptr, extra_positions_ptr, visible_ptr,
    parts_ptr, stats_ptr, plan_ptr, window, columns, extras, num_requests, pairs,
    share, units, least, most,
    GROUP: tl.constexpr, D: tl.constexpr, RAGGED: tl.constexpr, WHOLE: tl.constexpr, BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_input(PDL)
    head, heads, block = tl.program_id(0), tl.num_programs(0), tl.num_programs(2) - 1 - tl.program_id(2)
    request, split, num_splits, kept, key_len = tl.program_id(1), 0, 1, 0, 0
    if WHOLE:
        key_len = tl.load(key_lens_ptr + request)
    else:
        request, split, num_splits, kept, key_len = _assignment(
            request, key_lens_ptr, num_extras_ptr, window, num_requests, share, units, least, most, BLOCK_B
        )
        if request >= num_requests:
            return
    request = request.to(tl.int64)
    low, high = tl.load(row_starts_ptr + request), tl.load(row_starts_ptr + request + 1)
    low += block * BLOCK_M // GROUP  # the block's first row
    if (low >= high) & (block > 0):
        return
    table_ptr += tl.load(table_rows_ptr + request) * columns * 2
    num_extras = tl.load(num_extras_ptr + request)
    row, query_head = _pairs(block, heads, GROUP, BLOCK_M)
    mask, offs_d = row < (high - low).to(tl.int32), tl.arange(0, BLOCK_D)
    address = query_head[:, None] * D + offs_d[None, :]
    query_ptr += (low * heads + head) * GROUP * D
    query = tl.load(query_ptr + address, mask=mask[:, None] & (offs_d < D)[None, :], other=0.0).to(DOT)
    position = tl.load(positions_ptr + low + row, mask=mask, other=0).to(tl.int32)
    prefix_len = tl.load(prefix_lens_ptr + low + row, mask=mask, other=0)
    total, top = tl.zeros([BLOCK_M], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys_ptr, values_ptr, stride_slot = keys_ptr + head * D, values_ptr + head * D, heads * D
    scale = D**-0.5 * LOG2_E

    first, start, end = prefix_len, 0, key_len
    if RAGGED:
        first = tl.where(prefix_len > 0, tl.maximum(position - window + 1, 0), columns)  # of the window
        start, end = tl.min(first, axis=0), tl.max(prefix_len, axis=0)
    first_tile = start // BLOCK_C
    last_tile = tl.maximum(tl.cdiv(end, BLOCK_C), first_tile)
    num_tiles = last_tile - first_tile + tl.cdiv(num_extras, BLOCK_C)
    each = num_tiles // num_splits
    more = num_tiles - each * num_splits
    low_tile = first_tile + split * each + tl.minimum(split, more)
    high_tile = low_tile + each + (split < more).to(tl.int32)
    total, top, acc = _fold_prefix(
        total, top, acc, query, keys_ptr, values_ptr, table_ptr, tl.minimum(low_tile, last_tile),
        tl.minimum(high_tile, last_tile), first, prefix_len, start, end, columns, stride_slot, scale,
        RAGGED, D, BLOCK_D, BLOCK_C, STAGES,
    )  # fmt: skip
    low_again = tl.load(row_starts_ptr + request, volatile=True)  # or addresses would stay in registers meanwhile
    total, top, acc = _fold_extras(
        total, top, acc, query, keys_ptr, values_ptr, extra_slots_ptr + request * extras,
        extra_positions_ptr + request * extras, visible_ptr + low * ((extras + WORD - 1) // WORD), row, mask, position,
        tl.maximum(low_tile - last_tile, 0) * BLOCK_C, tl.minimum((high_tile - last_tile) * BLOCK_C, num_extras),
        extras, window, stride_slot, scale, D, BLOCK_D,
    )  # fmt: skip
    if not WHOLE and head + block + split == 0:
        tl.store(plan_ptr + 2 * request, kept)
        tl.store(plan_ptr + 2 * request + 1, num_splits)
    low_again += block * BLOCK_M // GROUP
    row, query_head = _pairs(block, heads, GROUP, BLOCK_M)
    mask = row < (high - low_again).to(tl.int32)
    mask_q = mask[:, None] & (offs_d < D)[None, :]
    if num_splits == 1:
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_ptr += (low_again * heads + head) * GROUP * D
        address = query_head[:, None] * D + offs_d[None, :]
        tl.store(out_ptr + address, nearest(out, out_ptr.dtype.element_ty), mask=mask_q)
    else:
        part = ((kept + split).to(tl.int64) * heads + head) * pairs + block * BLOCK_M
        parts_ptr, stats_ptr, pair = parts_ptr + part * D, stats_ptr + 2 * part, tl.arange(0, BLOCK_M)
        tl.store(parts_ptr + pair[:, None] * D + offs_d[None, :], acc, mask=mask_q)
        tl.store(stats_ptr + 2 * pair, top * scale, mask=mask)
        tl.store(stats_ptr + 2 * pair + 1, total, mask=mask)


@kernel
def _merge_kernel(
    out_ptr, parts_ptr, stats_ptr, plan_ptr, row_starts_ptr, pairs,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The parts of every row and head, always in their order; a request that is in one part is finished."""
    await_input(PDL)
    head, heads, request = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    kept, num_splits = tl.load(plan_ptr + 2 * request), tl.load(plan_ptr + 2 * request + 1)
    low, high = tl.load(row_starts_ptr + request), tl.load(row_starts_ptr + request + 1)
    if num_splits == 1:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    for start in range(tl.program_id(2) * BLOCK_R, pairs, tl.num_programs(2) * BLOCK_R):
        pair = start + tl.arange(0, BLOCK_R)
        row = low + pair // GROUP
        mask = row < high
        total, top = tl.zeros([BLOCK_R], tl.float32), tl.full([BLOCK_R], float("-inf"), tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for first in range(0, num_splits, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            part = ((kept + split).to(tl.int64)[None, :] * heads + head) * pairs + pair[:, None]
            mask_s = mask[:, None] & (split < num_splits)[None, :]
            part_top = tl.load(stats_ptr + 2 * part, mask=mask_s, other=float("-inf"))
            part_total = tl.load(stats_ptr + 2 * part + 1, mask=mask_s, other=0.0)
            mask_p = mask_s[:, :, None] & mask_d[None, None, :]
            parts = tl.load(parts_ptr + part[:, :, None] * D + offs_d[None, None, :], mask=mask_p, other=0.0)
            higher = tl.maximum(top, tl.max(part_top, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weight, before = tl.exp2(part_top - shift[:, None]), tl.exp2(top - shift)
            acc = acc * before[:, None] + tl.sum(parts * weight[:, :, None], axis=1)
            total, top = total * before + tl.sum(part_total * weight, axis=1), higher
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        address = ((row * heads + head) * GROUP + pair % GROUP)[:, None] * D + offs_d[None, :]
        tl.store(out_ptr + address, nearest(out, out_ptr.dtype.element_ty), mask=mask[:, None] & mask_d[None, :])


class Tiling(NamedTuple):
    """What a program holds: pairs of a row and a query head, keys of a tile, tiles on their way; and how it runs."""

    block_m: int
    block_c: int
    stages: int
    warps: int
    resident: int  # programs of a multiprocessor


def _tiling(pairs: int, block_d: int, dot: tl.dtype) -> Tiling:
    """As measured on an H200 for heads of 128 in two bytes; what is wider takes smaller tiles."""
    least = max(16, triton.next_power_of_2(pairs))
    if INTERPRETED:
        return Tiling(min(block_of(pairs, 64, max(128, block_d)), least), 128, 1, 4, 1)
    if dot.primitive_bitwidth > 16:
        return Tiling(min(least, max(16, 4096 // max(block_d, 128))), 32, 2, 8, 1)
    if block_d > 128:
        return Tiling(min(least, 64), 32, 2, 8, 1)
    if least >= 128:
        return Tiling(128, 64, 3, 8, 1)
    return Tiling(least, 64, 4 if least == 16 else 3, 4, 2)


class Partition(NamedTuple):
    """Into how many parts requests' keys go: one for every `share` keys or for more, so that those of all requests are
    no more than `units`, but at least one a request; from `least` to `most` of one request.
    """

    share: int
    units: int
    least: int
    most: int

    def most_units(self, num_requests: int) -> int:
        """Most that all requests come to, whatever their lengths."""
        return min(self.units + num_requests - 1, self.most * num_requests)


def _partition(programs: int, pairs: int, splits: int | None, invariant: bool) -> Partition:
    """programs: how many the device should have for each of a unit's; pairs: of a row and a query head of a unit."""
    if splits:
        return Partition(1, MANY, splits, splits)
    if invariant:  # by a request's own keys alone; parts of many rows would fill the memory
        return Partition(256, MANY, 1, max(1, min(16, 2048 // max(1, pairs))))
    return Partition(128, max(1, programs), 1, MANY)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def attention(
    query_RAD: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
    window: int | None,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """softmax(q·k / √D) v over the visible keys, [R, A, D]: online softmax in f32, rows of a request share key loads.

    window: a row sees that many last positions, its own included. Grouped queries share a key head. A row that sees
    nothing yields zeros. Slots that no row sees are not read. The keys of a request are read in parts side by side,
    which are merged in their order: `splits` of them; None: as many as keep the device busy, by the lengths of the
    whole batch, on which the last bits then depend; invariant: so many that they do not.
    """
    require_contiguous(query_RAD=query_RAD)
    out = torch.empty_like(query_RAD) if out is None else out
    keys, values, num_requests = kv.keys[layer], kv.values[layer], len(metadata.num_extras)
    heads, head_dim = keys.shape[1:]
    group = query_RAD.shape[1] // heads
    pairs, block_d = metadata.max_rows * group, max(16, triton.next_power_of_2(head_dim))
    dot = _dot_type(query_RAD.dtype, keys.dtype)
    tiling = _tiling(64 if invariant and not metadata.has_equal_rows else pairs, block_d, dot)
    blocks = triton.cdiv(pairs, tiling.block_m)
    programs = _multiprocessors(query_RAD.device) * tiling.resident // max(1, heads * blocks)
    partition = _partition(programs, pairs if metadata.has_equal_rows else MANY, splits, invariant)
    tile_bytes = tiling.block_c * block_d * dot.primitive_bitwidth // 8
    stages = stages_within(tiling.stages, 2 * tile_bytes, spare=tiling.block_m * block_d * 2)
    units = partition.most_units(num_requests)
    is_whole = units == num_requests
    parts = out.new_empty(0 if is_whole else units * heads * pairs, head_dim, dtype=torch.float32)
    stats, plan = parts.new_empty(len(parts), 2), metadata.num_extras.new_empty(num_requests, 2)
    _attention_kernel[heads, units, blocks](
        out, query_RAD, keys, values, metadata.positions, metadata.row_starts, metadata.table.view(torch.int32),
        metadata.table_rows, metadata.prefix_lens, metadata.key_lens, metadata.num_extras, metadata.extra_slots,
        metadata.extra_positions, metadata.visible, parts, stats, plan, MANY if window is None else window,
        metadata.table.shape[1], metadata.extra_slots.shape[1], num_requests, pairs, *partition,
        GROUP=group, D=head_dim, RAGGED=metadata.is_causal or window is not None, WHOLE=is_whole,
        BLOCK_B=_request_block(num_requests), BLOCK_M=tiling.block_m, BLOCK_D=block_d,
        BLOCK_C=tiling.block_c, STAGES=stages, DOT=dot, num_warps=tiling.warps, enable_fp_fusion=True,
    )  # fmt: skip
    if not is_whole:
        few = pairs < 128
        block_s = max(1, (2048 if few else 1024) // block_d)
        block_r = block_of(pairs, 1 if few else 4, block_s * block_d)
        blocks = min(triton.cdiv(pairs, block_r), triton.cdiv(MOST_MERGES, heads * num_requests))
        _merge_kernel[heads, num_requests, blocks](
            out, parts, stats, plan, metadata.row_starts, pairs,
            GROUP=group, D=head_dim, BLOCK_R=block_r, BLOCK_S=block_s, BLOCK_D=block_d,
            num_warps=2 if few else 4,
        )  # fmt: skip
    return out


def _request_block(num_requests: int) -> int:
    """The power of 16 that holds them: few, since each is a compilation."""
    return 1 << 4 * triton.cdiv(max(num_requests - 1, 0).bit_length(), 4)


def _dot_type(query: torch.dtype, keys: torch.dtype) -> tl.dtype:
    """What is multiplied: the common type, f32 for two types and under the interpreter, which cannot multiply bf16."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if INTERPRETED or query != keys else types.get(query, tl.float32)
