"""Attention over the keys that a forward's metadata names: parts of a request's keys side by side, then merged."""

import functools
import math
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.pool import KVBuffer
from specsim.fast.model.metadata import WORD, AttentionMetadata, KVTensors
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    block_of,
    ceil_div,
    kernel,
    nearest,
    next_power_of_2,
    require_contiguous,
    stages_within,
)

MOST_MERGES = 4096  # programs
MANY = 2**30  # more than any count here
LOG2_E = tl.constexpr(math.log2(math.e))


class Parts(NamedTuple):
    """Unfinished results of requests whose keys are read in several parts."""

    acc: torch.Tensor  # f32 [parts, D], weighted sums of values of every part, head and pair of a row and a query head
    stats: torch.Tensor  # f32 [parts, 2], the largest logit and the sum of weights
    plan: torch.Tensor  # i32 [B, 2], a request's first part and its number of parts


class Assignment(NamedTuple):
    """A unit's work, inside a kernel."""

    request: tl.tensor
    split: tl.tensor  # the part
    num_splits: tl.tensor  # parts of the request
    kept: tl.tensor  # the request's first part among those that are kept
    key_len: tl.tensor  # keys of the request's prefix


class HeadKV(NamedTuple):
    """Keys and values of one head, inside a kernel."""

    keys_ptr: tl.tensor
    values_ptr: tl.tensor
    stride_slot: tl.tensor


class Prefix(NamedTuple):
    """A request's prefix, inside a kernel: rows of a block see keys from `start` to `end`."""

    table_ptr: tl.tensor
    start: tl.tensor
    end: tl.tensor
    columns: tl.tensor  # of the table
    first: tl.tensor  # [BLOCK_M], first key that a row sees
    seen: tl.tensor  # [BLOCK_M], end of the keys that a row sees, 0 where it sees none


class Extras(NamedTuple):
    """A request's extra keys, inside a kernel."""

    slots_ptr: tl.tensor
    positions_ptr: tl.tensor
    visible_ptr: tl.tensor  # of the block's first row
    most: tl.tensor  # extra keys that a request may have


class BlockRows(NamedTuple):
    """Rows of a block of pairs, inside a kernel, [BLOCK_M]."""

    row: tl.tensor  # counted from the block's first
    mask: tl.tensor
    position: tl.tensor
    window: tl.tensor  # last positions that a row sees


@triton.jit
@no_type_check
def _assignment(unit, metadata_ptrs, window, num_requests, share, units, least, most, BLOCK_B: tl.constexpr):
    """Assign a part of a request to a unit: Assignment; past the last unit, of a request that does not exist.

    A request's number of parts goes with its keys: one for every `share` of them, or for more, so that there are no
    more than `units` in all, but at least `least` and at most `most`.
    """
    offs = tl.arange(0, BLOCK_B)
    mask = offs < num_requests
    length = tl.load(metadata_ptrs.key_lens + offs, mask=mask, other=0)
    work = tl.minimum(length, window) + tl.load(metadata_ptrs.num_extras + offs, mask=mask, other=0)
    share = tl.maximum(share, tl.cdiv(tl.sum(work, axis=0), units))
    splits = tl.where(mask, tl.minimum(tl.maximum(work // share, least), most), 0)
    ends = tl.cumsum(splits, axis=0)
    request = tl.sum((ends <= unit).to(tl.int32), axis=0)
    kept = tl.sum(tl.where((offs < request) & (splits > 1), splits, 0), axis=0)
    own = offs == request
    num_splits = tl.sum(tl.where(own, splits, 0), axis=0)
    split = unit - tl.sum(tl.where(own, ends - splits, 0), axis=0)
    return Assignment(request, split, num_splits, kept, tl.sum(tl.where(own, length, 0), axis=0))


@triton.jit
@no_type_check
def _pairs(block, heads, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Pairs of a row and a query head of the group, [BLOCK_M] each, counted from the block's first row."""
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // GROUP - block * BLOCK_M // GROUP
    return row, row * heads * GROUP + pair % GROUP


@triton.jit
@no_type_check
def _read(base_ptr, slot, loaded, stride_slot, query, D: tl.constexpr):
    """Read the keys or values in these slots, [BLOCK_C, BLOCK_D] in the query's type, zeros where not loaded."""
    BLOCK_D: tl.constexpr = query.shape[1]
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    mask = loaded[:, None]
    if D < BLOCK_D:
        mask = mask & (offs_d < D)
    return tl.load(base_ptr + slot.to(tl.int64)[:, None] * stride_slot + offs_d, mask=mask, other=0.0).to(query.dtype)


@triton.jit
@no_type_check
def _fold(total, top, acc, logits, value, scale):
    """Fold a tile of keys into the online softmax; logits, made powers of two by `scale`, are -inf where unseen."""
    higher = tl.maximum(top, tl.max(logits, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher * scale)
    weight = tl.exp2(logits * scale - shift[:, None])
    kept = tl.exp2(top * scale - shift)
    acc = tl.dot(weight.to(value.dtype), value, acc * kept[:, None], input_precision="ieee")
    return total * kept + tl.sum(weight, axis=1), higher, acc


@triton.jit
@no_type_check
def _fold_seen_by_all(
    total,
    top,
    acc,
    query,
    kv,
    table_ptr,
    low_tile,
    high_tile,
    scale,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fold tiles of the prefix of which every row sees every key."""
    offs_c = tl.arange(0, BLOCK_C)
    end = high_tile * BLOCK_C
    column = low_tile * BLOCK_C + offs_c
    slot = tl.load(table_ptr + 2 * column, mask=column < end, other=-1)
    for tile in tl.range(low_tile, high_tile, num_stages=STAGES):
        column = (tile + 1) * BLOCK_C + offs_c
        next_slot = tl.load(table_ptr + 2 * column, mask=column < end, other=-1)  # a tile ahead, or keys would wait
        key = _read(kv.keys_ptr, slot, slot >= 0, kv.stride_slot, query, D)
        value = _read(kv.values_ptr, slot, slot >= 0, kv.stride_slot, query, D)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        total, top, acc = _fold(total, top, acc, logits, value, scale)
        slot = next_slot
    return total, top, acc


@triton.jit
@no_type_check
def _fold_prefix(
    total,
    top,
    acc,
    query,
    kv,
    prefix,
    low_tile,
    high_tile,
    scale,
    RAGGED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Fold tiles of the prefix: those that every row sees whole, then those at the edges of what rows see."""
    all_from = prefix.start
    all_until = prefix.end
    if RAGGED:
        all_from = tl.max(tl.where(prefix.seen > 0, prefix.first, 0), axis=0)
        all_until = tl.min(tl.where(prefix.seen > 0, prefix.seen, prefix.columns), axis=0)
    low_whole = tl.minimum(tl.maximum(low_tile, tl.cdiv(all_from, BLOCK_C)), high_tile)
    high_whole = tl.minimum(tl.maximum(low_whole, all_until // BLOCK_C), high_tile)
    total, top, acc = _fold_seen_by_all(
        total, top, acc, query, kv, prefix.table_ptr, low_whole, high_whole, scale, D, BLOCK_C, STAGES
    )
    for edge in tl.range(low_tile, high_tile - (high_whole - low_whole), num_stages=1):
        tile = edge + tl.where(edge < low_whole, 0, high_whole - low_whole)
        column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        slot = tl.load(prefix.table_ptr + 2 * column, mask=(column >= prefix.start) & (column < prefix.end), other=-1)
        key = _read(kv.keys_ptr, slot, slot >= 0, kv.stride_slot, query, D)
        value = _read(kv.values_ptr, slot, slot >= 0, kv.stride_slot, query, D)
        seen = (slot >= 0)[None, :]
        if RAGGED:
            seen = (column[None, :] >= prefix.first[:, None]) & (column[None, :] < prefix.seen[:, None])
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        total, top, acc = _fold(total, top, acc, tl.where(seen, logits, float("-inf")), value, scale)
    dropped = prefix.seen == 0  # such a row has folded keys that it does not see
    return tl.where(dropped, 0.0, total), tl.where(dropped, float("-inf"), top), tl.where(dropped[:, None], 0.0, acc)


@triton.jit
@no_type_check
def _fold_extras(total, top, acc, query, kv, extras, rows, low, high, scale, D: tl.constexpr):
    """Fold extra keys low..high, 32 at a time; one that no row sees is not read."""
    num_words = (extras.most + WORD - 1) // WORD
    bit = tl.arange(0, WORD)
    for extra in tl.range(low, high, WORD, num_stages=1):
        bits = tl.load(extras.visible_ptr + rows.row * num_words + extra // WORD, mask=rows.mask, other=0)  # [BLOCK_M]
        inside = extra + bit < extras.most
        slot = tl.load(extras.slots_ptr + extra + bit, mask=inside, other=-1)
        place = tl.load(extras.positions_ptr + extra + bit, mask=inside, other=0)
        visible = ((bits[:, None] >> bit[None, :]) & 1 != 0) & (slot >= 0)[None, :]  # [BLOCK_M, WORD]
        visible = visible & (rows.position[:, None] - place[None, :] < rows.window)
        loaded = tl.max(visible.to(tl.int32), axis=0) > 0
        key = _read(kv.keys_ptr, slot, loaded, kv.stride_slot, query, D)
        value = _read(kv.values_ptr, slot, loaded, kv.stride_slot, query, D)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        total, top, acc = _fold(total, top, acc, tl.where(visible, logits, float("-inf")), value, scale)
    return total, top, acc


@kernel
@no_type_check
def _attention_kernel(
    out_ptr,
    query_ptr,
    kv_ptrs,
    metadata_ptrs,
    table_ptr,
    table_rows_ptr,
    parts_ptrs,
    window,
    columns,
    extras,
    num_requests,
    pairs,
    share,
    units,
    least,
    most,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    RAGGED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from a block of rows and query heads of one key head to a part of a request's keys."""
    await_input(PDL)
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    request = tl.program_id(1)
    split = 0
    num_splits = 1
    kept = 0
    key_len = 0
    if WHOLE:
        key_len = tl.load(metadata_ptrs.key_lens + request)
    else:
        request, split, num_splits, kept, key_len = _assignment(
            request, metadata_ptrs, window, num_requests, share, units, least, most, BLOCK_B
        )
        if request >= num_requests:
            return
    request = request.to(tl.int64)
    low = tl.load(metadata_ptrs.row_starts + request)
    high = tl.load(metadata_ptrs.row_starts + request + 1)
    low += block * BLOCK_M // GROUP  # the block's first row
    if (low >= high) & (block > 0):
        return
    table_ptr += tl.load(table_rows_ptr + request) * columns * 2
    num_extras = tl.load(metadata_ptrs.num_extras + request)
    row, query_head = _pairs(block, heads, GROUP, BLOCK_M)  # [BLOCK_M]
    mask = row < (high - low).to(tl.int32)
    offs_d = tl.arange(0, BLOCK_D)
    address = query_head[:, None] * D + offs_d[None, :]
    query_ptr += (low * heads + head) * GROUP * D
    mask_q = mask[:, None] & (offs_d < D)[None, :]  # [BLOCK_M, BLOCK_D]
    query = tl.load(query_ptr + address, mask=mask_q, other=0.0).to(DOT)
    position = tl.load(metadata_ptrs.positions + low + row, mask=mask, other=0).to(tl.int32)
    prefix_len = tl.load(metadata_ptrs.prefix_lens + low + row, mask=mask, other=0)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    kv = HeadKV(kv_ptrs.keys_ptr + head * D, kv_ptrs.values_ptr + head * D, heads * D)
    scale = D**-0.5 * LOG2_E

    first = prefix_len
    start = 0
    end = key_len
    if RAGGED:
        first = tl.where(prefix_len > 0, tl.maximum(position - window + 1, 0), columns)  # of the window
        start = tl.min(first, axis=0)
        end = tl.max(prefix_len, axis=0)
    first_tile = start // BLOCK_C
    last_tile = tl.maximum(tl.cdiv(end, BLOCK_C), first_tile)
    num_tiles = last_tile - first_tile + tl.cdiv(num_extras, BLOCK_C)
    each = num_tiles // num_splits
    more = num_tiles - each * num_splits
    low_tile = first_tile + split * each + tl.minimum(split, more)
    high_tile = low_tile + each + (split < more).to(tl.int32)
    prefix = Prefix(table_ptr, start, end, columns, first, prefix_len)
    low_prefix = tl.minimum(low_tile, last_tile)
    high_prefix = tl.minimum(high_tile, last_tile)
    total, top, acc = _fold_prefix(
        total, top, acc, query, kv, prefix, low_prefix, high_prefix, scale, RAGGED, D, BLOCK_C, STAGES
    )
    # Loaded again, or addresses would stay in registers meanwhile.
    low_again = tl.load(metadata_ptrs.row_starts + request, volatile=True)
    keys = Extras(
        metadata_ptrs.extra_slots + request * extras,
        metadata_ptrs.extra_positions + request * extras,
        metadata_ptrs.visible + low * ((extras + WORD - 1) // WORD),
        extras,
    )
    rows = BlockRows(row, mask, position, window)
    low_extra = tl.maximum(low_tile - last_tile, 0) * BLOCK_C
    high_extra = tl.minimum((high_tile - last_tile) * BLOCK_C, num_extras)
    total, top, acc = _fold_extras(total, top, acc, query, kv, keys, rows, low_extra, high_extra, scale, D)
    if not WHOLE and head + block + split == 0:
        tl.store(parts_ptrs.plan + 2 * request, kept)
        tl.store(parts_ptrs.plan + 2 * request + 1, num_splits)
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
        acc_ptr = parts_ptrs.acc + part * D
        stats_ptr = parts_ptrs.stats + 2 * part
        pair = tl.arange(0, BLOCK_M)
        tl.store(acc_ptr + pair[:, None] * D + offs_d[None, :], acc, mask=mask_q)
        tl.store(stats_ptr + 2 * pair, top * scale, mask=mask)
        tl.store(stats_ptr + 2 * pair + 1, total, mask=mask)


@kernel
@no_type_check
def _merge_kernel(
    out_ptr,
    parts_ptrs,
    row_starts_ptr,
    pairs,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the parts of every row and head, always in their order; a request in one part is finished."""
    await_input(PDL)
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    request = tl.program_id(1).to(tl.int64)
    kept = tl.load(parts_ptrs.plan + 2 * request)
    num_splits = tl.load(parts_ptrs.plan + 2 * request + 1)
    low = tl.load(row_starts_ptr + request)
    high = tl.load(row_starts_ptr + request + 1)
    if num_splits == 1:
        return
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    for start in range(tl.program_id(2) * BLOCK_R, pairs, tl.num_programs(2) * BLOCK_R):
        pair = start + tl.arange(0, BLOCK_R)
        row = low + pair // GROUP
        mask = row < high
        total = tl.zeros([BLOCK_R], tl.float32)
        top = tl.full([BLOCK_R], float("-inf"), tl.float32)
        acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
        for first in range(0, num_splits, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            part = ((kept + split).to(tl.int64)[None, :] * heads + head) * pairs + pair[:, None]
            mask_s = mask[:, None] & (split < num_splits)[None, :]
            part_top = tl.load(parts_ptrs.stats + 2 * part, mask=mask_s, other=float("-inf"))
            part_total = tl.load(parts_ptrs.stats + 2 * part + 1, mask=mask_s, other=0.0)
            mask_p = mask_s[:, :, None] & mask_d[None, None, :]
            part_ptr = parts_ptrs.acc + part[:, :, None] * D + offs_d[None, None, :]
            parts = tl.load(part_ptr, mask=mask_p, other=0.0)  # [BLOCK_R, BLOCK_S, BLOCK_D]
            higher = tl.maximum(top, tl.max(part_top, axis=1))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            weight = tl.exp2(part_top - shift[:, None])
            before = tl.exp2(top - shift)
            acc = acc * before[:, None] + tl.sum(parts * weight[:, :, None], axis=1)
            total = total * before + tl.sum(part_total * weight, axis=1)
            top = higher
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        address = ((row * heads + head) * GROUP + pair % GROUP)[:, None] * D + offs_d[None, :]
        tl.store(out_ptr + address, nearest(out, out_ptr.dtype.element_ty), mask=mask[:, None] & mask_d[None, :])


class Tiling(NamedTuple):
    """Size and form of a program."""

    block_m: int  # pairs of a row and a query head
    block_c: int  # keys of a tile
    stages: int  # tiles that are loaded at a time
    warps: int
    resident: int  # programs of a multiprocessor


def _tiling(pairs: int, block_d: int, dot: tl.dtype) -> Tiling:
    """Choose as measured on an H200 for heads of 128 in two bytes; wider heads take smaller tiles."""
    least = max(16, next_power_of_2(pairs))
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
    """Numbers of parts into which requests' keys are cut: one for every `share` keys, or for more."""

    share: int
    units: int  # bound on the parts of all requests, but for one of each request
    least: int  # parts of one request
    most: int  # parts of one request

    def most_units(self, num_requests: int) -> int:
        """Bound the parts of all requests, whatever their lengths."""
        return min(self.units + num_requests - 1, self.most * num_requests)


def _partition(programs: int, pairs: int, splits: int | None, invariant: bool) -> Partition:
    """Choose a partition for `programs` units on the device, each of `pairs` of a row and a query head."""
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
    *,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """softmax(q·k / √D) v over the visible keys, [R, A, D]: online softmax in f32, rows of a request share key loads.

    window: a row sees that many last positions, its own included. Grouped queries share a key head. A row that sees
    nothing yields zeros. Slots that no row sees are not read. The keys of a request are read in parts side by side,
    which are merged in their order: `splits` of them; None: as many as keep the device busy, by the lengths of the
    whole batch, on which the last bits then depend; invariant: a number on which they do not.
    """
    require_contiguous(query_RAD=query_RAD)
    out = torch.empty_like(query_RAD) if out is None else out
    keys = kv.keys[layer]
    values = kv.values[layer]
    num_requests = len(metadata.num_extras)
    heads, head_dim = keys.shape[1:]
    group = query_RAD.shape[1] // heads
    pairs = metadata.max_rows * group
    block_d = max(16, next_power_of_2(head_dim))
    dot = _dot_type(query_RAD.dtype, keys.dtype)
    tiling = _tiling(64 if invariant and not metadata.has_equal_rows else pairs, block_d, dot)
    blocks = ceil_div(pairs, tiling.block_m)
    programs = _multiprocessors(query_RAD.device) * tiling.resident // max(1, heads * blocks)
    partition = _partition(programs, pairs if metadata.has_equal_rows else MANY, splits, invariant)
    tile_bytes = tiling.block_c * block_d * dot.primitive_bitwidth // 8
    stages = stages_within(tiling.stages, 2 * tile_bytes, spare=tiling.block_m * block_d * 2)
    units = partition.most_units(num_requests)
    is_whole = units == num_requests
    acc = out.new_empty(0 if is_whole else units * heads * pairs, head_dim, dtype=torch.float32)
    parts = Parts(acc, acc.new_empty(len(acc), 2), metadata.num_extras.new_empty(num_requests, 2))
    _attention_kernel[heads, units, blocks](
        out_ptr=out,
        query_ptr=query_RAD,
        kv_ptrs=KVTensors(keys, values),
        metadata_ptrs=metadata.tensors,
        table_ptr=metadata.table.view(torch.int32),
        table_rows_ptr=metadata.table_rows,
        parts_ptrs=parts,
        window=MANY if window is None else window,
        columns=metadata.table.shape[1],
        extras=metadata.extra_slots.shape[1],
        num_requests=num_requests,
        pairs=pairs,
        share=partition.share,
        units=partition.units,
        least=partition.least,
        most=partition.most,
        GROUP=group,
        D=head_dim,
        RAGGED=metadata.is_causal or window is not None,
        WHOLE=is_whole,
        BLOCK_B=_request_block(num_requests),
        BLOCK_M=tiling.block_m,
        BLOCK_D=block_d,
        BLOCK_C=tiling.block_c,
        STAGES=stages,
        DOT=dot,
        num_warps=tiling.warps,
        enable_fp_fusion=True,
    )
    if not is_whole:
        _merge(out, parts, metadata, heads, group)
    return out


def _merge(out: torch.Tensor, parts: Parts, metadata: AttentionMetadata, heads: int, group: int) -> None:
    """Merge the parts of every request into its results."""
    num_requests = len(parts.plan)
    head_dim = parts.acc.shape[1]
    pairs = metadata.max_rows * group
    block_d = max(16, next_power_of_2(head_dim))
    few = pairs < 128
    block_s = max(1, (2048 if few else 1024) // block_d)
    block_r = block_of(pairs, 1 if few else 4, block_s * block_d)
    blocks = min(ceil_div(pairs, block_r), ceil_div(MOST_MERGES, heads * num_requests))
    _merge_kernel[heads, num_requests, blocks](
        out_ptr=out,
        parts_ptrs=parts,
        row_starts_ptr=metadata.row_starts,
        pairs=pairs,
        GROUP=group,
        D=head_dim,
        BLOCK_R=block_r,
        BLOCK_S=block_s,
        BLOCK_D=block_d,
        num_warps=2 if few else 4,
    )


def _request_block(num_requests: int) -> int:
    """Round up to a power of 16: few values, since each is a compilation."""
    return 1 << 4 * ceil_div(max(num_requests - 1, 0).bit_length(), 4)


def _dot_type(query: torch.dtype, keys: torch.dtype) -> tl.dtype:
    """Type of a product's factors: the common one, f32 for two types and in the interpreter."""
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    return tl.float32 if INTERPRETED or query != keys else types.get(query, tl.float32)
