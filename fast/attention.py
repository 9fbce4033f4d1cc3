"""Attention over the keys in a forward's metadata, read in parallel parts that are then merged."""

import math
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.pool import KVBuffer
from specsim.fast.model.attention_plan import MANY, AttentionParts, assignment, make_plan, merge, store_part, tiles_of
from specsim.fast.model.metadata import WORD, AttentionMetadata
from specsim.fast.runtime.launch import await_input, kernel, nearest, next_power_of_2, require_contiguous

LOG2_E = tl.constexpr(math.log2(math.e))


class HeadKV(NamedTuple):
    """Keys and values of one head, inside a kernel."""

    keys_ptr: tl.tensor
    values_ptr: tl.tensor
    stride_slot: tl.tensor


class Query(NamedTuple):
    """Queries of a block of pairs, inside a kernel."""

    nope: tl.tensor  # [BLOCK_M, BLOCK_D], the channels that meet a key's first D
    rope: tl.tensor  # [BLOCK_M, BLOCK_T], the others, where a key has more


class Prefix(NamedTuple):
    """A request's prefix, inside a kernel, with rows of a block seeing keys from `start` to `end`."""

    table_ptr: tl.tensor
    start: tl.tensor
    end: tl.tensor
    columns: tl.tensor  # of the table
    first: tl.tensor  # [BLOCK_M], first key of a row's window
    seen: tl.tensor  # [BLOCK_M], end of the keys that a row sees, 0 where it sees none
    first_columns: tl.tensor  # keys from column 0 on that every row sees
    window_tile: tl.tensor  # tile of `start`
    skipped: tl.tensor  # tiles between the first columns and that one; the tiles of the first columns count from here


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
    first_columns: tl.tensor  # first positions that it sees besides


class Window(NamedTuple):
    """Positions that a row sees, as a kernel's argument."""

    last: int  # its own included
    first: int


@triton.jit
@no_type_check
def visible_prefix(
    table_ptr, columns, position, prefix_len, key_len, window, RAGGED: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Make the Prefix of a request for the rows of a block.

    RAGGED: rows may see different parts of it.
    """
    first = prefix_len
    start = 0
    end = key_len
    if RAGGED:
        first = tl.where(prefix_len > 0, tl.maximum(position - window.last + 1, 0), columns)  # of the window
        start = tl.min(first, axis=0)
        end = tl.max(prefix_len, axis=0)
    window_tile = start // BLOCK_C
    skipped = tl.maximum(window_tile - tl.cdiv(window.first, BLOCK_C), 0)
    return Prefix(table_ptr, start, end, columns, first, prefix_len, window.first, window_tile, skipped)


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
def _tile(query, kv, slot, loaded, D: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Read a tile of keys and values: (logits [BLOCK_M, BLOCK_C], values [BLOCK_C, BLOCK_D])."""
    key = _read(kv.keys_ptr, slot, loaded, kv.stride_slot, query.nope, D)
    if ROPE_DIM > 0:
        rope_key = _read(kv.keys_ptr + D, slot, loaded, kv.stride_slot, query.rope, ROPE_DIM)
        logits = tl.dot(query.nope, tl.trans(key), input_precision="ieee")
        logits = tl.dot(query.rope, tl.trans(rope_key), logits, input_precision="ieee")
        value = key
    else:
        value = _read(kv.values_ptr, slot, loaded, kv.stride_slot, query.nope, D)
        logits = tl.dot(query.nope, tl.trans(key), input_precision="ieee")
    return logits, value


@triton.jit
@no_type_check
def _fold(total, top, acc, logits, value, scale):
    """Add a tile of keys to the online softmax.

    `scale` makes the logits powers of two; logits of keys that a row does not see are -inf.
    """
    higher = tl.maximum(top, tl.max(logits, axis=1))
    shift = tl.where(higher == float("-inf"), 0.0, higher * scale)
    weight = tl.exp2(logits * scale - shift[:, None])
    rescale = tl.exp2(top * scale - shift)
    acc = tl.dot(weight.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
    return total * rescale + tl.sum(weight, axis=1), higher, acc


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
    ROPE_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add tiles of the prefix in which every row sees every key."""
    offs_c = tl.arange(0, BLOCK_C)
    end = high_tile * BLOCK_C
    column = low_tile * BLOCK_C + offs_c
    slot = tl.load(table_ptr + 2 * column, mask=column < end, other=-1)
    for tile in tl.range(low_tile, high_tile, num_stages=STAGES):
        column = (tile + 1) * BLOCK_C + offs_c
        next_slot = tl.load(table_ptr + 2 * column, mask=column < end, other=-1)  # a tile ahead, or keys would wait
        logits, value = _tile(query, kv, slot, slot >= 0, D, ROPE_DIM)
        total, top, acc = _fold(total, top, acc, logits, value, scale)
        slot = next_slot
    return total, top, acc


@triton.jit
@no_type_check
def fold_prefix(
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
    ROPE_DIM: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Add tiles of the prefix: first those that every row sees whole, then those at visible edges."""
    all_from = prefix.start
    all_until = prefix.end
    if RAGGED:
        all_from = tl.max(tl.where(prefix.seen > 0, prefix.first, 0), axis=0)
        all_until = tl.min(tl.where(prefix.seen > 0, prefix.seen, prefix.columns), axis=0)
    low_whole = tl.minimum(tl.maximum(low_tile, tl.cdiv(all_from, BLOCK_C)), high_tile)
    high_whole = tl.minimum(tl.maximum(low_whole, all_until // BLOCK_C), high_tile)
    total, top, acc = _fold_seen_by_all(
        total, top, acc, query, kv, prefix.table_ptr, low_whole, high_whole, scale, D, ROPE_DIM, BLOCK_C, STAGES
    )
    for edge in tl.range(low_tile, high_tile - (high_whole - low_whole), num_stages=1):
        tile = edge + tl.where(edge < low_whole, 0, high_whole - low_whole)
        tile -= tl.where(tile < prefix.window_tile, prefix.skipped, 0)
        column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        is_first = column < prefix.first_columns
        mask = (is_first | (column >= prefix.start)) & (column < prefix.end)
        slot = tl.load(prefix.table_ptr + 2 * column, mask=mask, other=-1)
        logits, value = _tile(query, kv, slot, slot >= 0, D, ROPE_DIM)
        seen = (slot >= 0)[None, :]
        if RAGGED:
            seen = is_first[None, :] | (column[None, :] >= prefix.first[:, None])
            seen = seen & (column[None, :] < prefix.seen[:, None])
        total, top, acc = _fold(total, top, acc, tl.where(seen, logits, float("-inf")), value, scale)
    dropped = prefix.seen == 0  # such a row has folded keys that it does not see
    return tl.where(dropped, 0.0, total), tl.where(dropped, float("-inf"), top), tl.where(dropped[:, None], 0.0, acc)


@triton.jit
@no_type_check
def fold_extras(total, top, acc, query, kv, extras, rows, low, high, scale, D: tl.constexpr, ROPE_DIM: tl.constexpr):
    """Add extra keys low..high, 32 at a time, reading only keys that some row sees."""
    num_words = (extras.most + WORD - 1) // WORD
    bit = tl.arange(0, WORD)
    for extra in tl.range(low, high, WORD, num_stages=1):
        bits = tl.load(extras.visible_ptr + rows.row * num_words + extra // WORD, mask=rows.mask, other=0)  # [BLOCK_M]
        inside = extra + bit < extras.most
        slot = tl.load(extras.slots_ptr + extra + bit, mask=inside, other=-1)
        extra_position = tl.load(extras.positions_ptr + extra + bit, mask=inside, other=0)
        visible = ((bits[:, None] >> bit[None, :]) & 1 != 0) & (slot >= 0)[None, :]  # [BLOCK_M, WORD]
        is_first = (extra_position < rows.first_columns)[None, :]
        visible = visible & (is_first | (rows.position[:, None] - extra_position[None, :] < rows.window))
        loaded = tl.max(visible.to(tl.int32), axis=0) > 0
        logits, value = _tile(query, kv, slot, loaded, D, ROPE_DIM)
        total, top, acc = _fold(total, top, acc, tl.where(visible, logits, float("-inf")), value, scale)
    return total, top, acc


class Scores(NamedTuple):
    """Scores of a layer's keys, beyond q·k / √D."""

    window: int | None = None  # positions that a row sees, its own last; None: all
    sinks: torch.Tensor | None = None  # [A], a score more of each query head, whose share of the softmax is lost
    scale: float | None = None  # factor of q·k; None: 1 / √D
    rope_dim: int = 0  # last channels of keys, which values do not have; the others are the value (latent attention)
    first_columns: int = 0  # positions from 0 on that a row sees besides its window


_PLAIN = Scores()


class PagedKV(NamedTuple):
    """KV of a layer and the table of its slots, as kernel arguments."""

    keys_ptr: torch.Tensor  # [slots, heads, D]
    values_ptr: torch.Tensor
    table_ptr: torch.Tensor  # i32 [rows, 2 columns], the table's i64, of which the lower halves are read
    rows_ptr: torch.Tensor  # i64 [B], a request's row
    columns: int  # of the table


@triton.jit
@no_type_check
def _pairs(block, heads, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """Pairs of a row and a query head of the group, [BLOCK_M] each, counted from the block's first row."""
    pair = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row = pair // GROUP - block * BLOCK_M // GROUP
    return row, row * heads * GROUP + pair % GROUP


@kernel
@no_type_check
def _attention_kernel(
    out_ptr,
    query_ptr,
    kv_ptrs,
    metadata_ptrs,
    parts_ptrs,
    sinks_ptr,
    partition,
    window,
    extras,
    num_requests,
    pairs,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    SCALE: tl.constexpr,
    VALUE_SCALE: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend from a block of rows and query heads of one key head to a part of a request's keys.

    Without a partition each request's keys are one part, and nothing is merged. With ROPE_DIM, a key is its value
    followed by ROPE_DIM rotated channels.
    """
    await_input(PDL)
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    block = tl.num_programs(2) - 1 - tl.program_id(2)
    request = tl.program_id(1)
    split = 0
    num_splits = 1
    first_part = 0
    key_len = 0
    if partition is None:
        key_len = tl.load(metadata_ptrs.key_lens + request)
    else:
        request, split, num_splits, first_part, key_len = assignment(
            tl.arange(0, BLOCK_B), request, metadata_ptrs, window.last + window.first, num_requests, partition
        )
        if request >= num_requests:
            return
    request = request.to(tl.int64)
    low = tl.load(metadata_ptrs.row_starts + request)
    high = tl.load(metadata_ptrs.row_starts + request + 1)
    low += block * BLOCK_M // GROUP  # the block's first row
    if (low >= high) & (block > 0):
        return
    columns = kv_ptrs.columns
    table_ptr = kv_ptrs.table_ptr + tl.load(kv_ptrs.rows_ptr + request) * columns * 2
    num_extras = tl.load(metadata_ptrs.num_extras + request)
    row, query_head = _pairs(block, heads, GROUP, BLOCK_M)  # [BLOCK_M]
    mask = row < (high - low).to(tl.int32)
    offs_d = tl.arange(0, BLOCK_D)
    WIDTH: tl.constexpr = D + ROPE_DIM
    address = query_head[:, None] * WIDTH + offs_d[None, :]
    query_ptr += (low * heads + head) * GROUP * WIDTH
    mask_q = mask[:, None] & (offs_d < D)[None, :]  # [BLOCK_M, BLOCK_D]
    query = tl.load(query_ptr + address, mask=mask_q, other=0.0).to(DOT)
    rope_query = query
    if ROPE_DIM > 0:
        offs_rope = tl.arange(0, BLOCK_ROPE)
        rope_ptrs = query_ptr + query_head[:, None] * WIDTH + D + offs_rope[None, :]
        rope_query = tl.load(rope_ptrs, mask=mask[:, None] & (offs_rope < ROPE_DIM)[None, :], other=0.0).to(DOT)
    query = Query(query, rope_query)
    position = tl.load(metadata_ptrs.positions + low + row, mask=mask, other=0).to(tl.int32)
    prefix_len = tl.load(metadata_ptrs.prefix_lens + low + row, mask=mask, other=0)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    kv = HeadKV(kv_ptrs.keys_ptr + head * WIDTH, kv_ptrs.values_ptr + head * D, heads * WIDTH)
    scale = SCALE * LOG2_E

    prefix = visible_prefix(table_ptr, columns, position, prefix_len, key_len, window, RAGGED, BLOCK_C)
    first_tile = prefix.skipped
    last_tile = tl.maximum(tl.cdiv(prefix.end, BLOCK_C), first_tile)
    num_tiles = last_tile - first_tile + tl.cdiv(num_extras, BLOCK_C)
    low_tile, high_tile = tiles_of(split, num_splits, first_tile, num_tiles)
    low_prefix = tl.minimum(low_tile, last_tile)
    high_prefix = tl.minimum(high_tile, last_tile)
    total, top, acc = fold_prefix(
        total, top, acc, query, kv, prefix, low_prefix, high_prefix, scale, RAGGED, D, ROPE_DIM, BLOCK_C, STAGES
    )
    # Loaded again, so that no addresses stay in registers meanwhile.
    low_again = tl.load(metadata_ptrs.row_starts + request, volatile=True)
    keys = Extras(
        metadata_ptrs.extra_slots + request * extras,
        metadata_ptrs.extra_positions + request * extras,
        metadata_ptrs.visible + low * ((extras + WORD - 1) // WORD),
        extras,
    )
    rows = BlockRows(row, mask, position, window.last, window.first)
    low_extra = tl.maximum(low_tile - last_tile, 0) * BLOCK_C
    high_extra = tl.minimum((high_tile - last_tile) * BLOCK_C, num_extras)
    total, top, acc = fold_extras(total, top, acc, query, kv, keys, rows, low_extra, high_extra, scale, D, ROPE_DIM)
    low_again += block * BLOCK_M // GROUP
    row, query_head = _pairs(block, heads, GROUP, BLOCK_M)
    mask = row < (high - low_again).to(tl.int32)
    mask_q = mask[:, None] & (offs_d < D)[None, :]
    top = top * scale
    if VALUE_SCALE != 1.0:
        acc = acc * VALUE_SCALE
    if sinks_ptr is not None:
        in_group = (block * BLOCK_M + tl.arange(0, BLOCK_M)) % GROUP
        sink = tl.load(sinks_ptr + head * GROUP + in_group).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, tl.where(split == 0, sink, float("-inf")))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        before = tl.exp2(top - shift)
        total = total * before + tl.where(split == 0, tl.exp2(sink - shift), 0.0)
        acc = acc * before[:, None]
        top = higher
    if num_splits == 1:
        out = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_ptr += (low_again * heads + head) * GROUP * D
        tl.store(
            out_ptr + query_head[:, None] * D + offs_d[None, :], nearest(out, out_ptr.dtype.element_ty), mask=mask_q
        )
    if partition is not None:
        if head + block + split == 0:
            tl.store(parts_ptrs.spans + 2 * request, first_part)
            tl.store(parts_ptrs.spans + 2 * request + 1, num_splits)
        if num_splits > 1:
            part = ((first_part + split).to(tl.int64) * heads + head) * pairs + block * BLOCK_M
            store_part(parts_ptrs, part, acc, top, total, mask, mask_q, D)


def attention(
    query_RAD: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
    scores: Scores | None,
    *,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """Compute softmax(q·k / √D) v over the visible keys, [R, A, D], with online softmax in f32.

    Fused: grouped queries, masks, and the loads of keys that several rows of a request see. scores: None for plain
    ones. A row that sees nothing gives zeros. Slots that no row sees are not read.

    A request's keys are read in parallel parts, merged in order. splits: number of parts; None: enough to fill the
    device, so that the last bits depend on the lengths of the whole batch; with invariant they do not.
    """
    window, sinks, scale, rope_dim, first_columns = _PLAIN if scores is None else scores
    require_contiguous(query_RAD=query_RAD, sinks=sinks)
    keys = kv.keys[layer]
    heads, head_dim = keys.shape[1], keys.shape[2] - rope_dim
    out = query_RAD.new_empty(*query_RAD.shape[:2], head_dim) if out is None else out
    num_requests = len(metadata.num_extras)
    is_plain = window is None and sinks is None and rope_dim == 0
    plan = make_plan(query_RAD, keys, head_dim, metadata, splits, invariant, is_plain)
    parts = None if plan.partition is None else AttentionParts.empty(out, plan, num_requests)
    table = metadata.table
    kv_ptrs = PagedKV(
        keys, keys if rope_dim else kv.values[layer], table.view(torch.int32), metadata.table_rows, table.shape[1]
    )
    scale = (head_dim**-0.5 if scale is None else scale) * kv.key_scale
    if plan.is_pipelined:
        from specsim.fast.model.attention_pipeline import attend_in_pipeline

        attend_in_pipeline(out, query_RAD, kv_ptrs, metadata, parts, plan, scale)
    else:
        _attention_kernel[heads, plan.units, plan.blocks](
            out_ptr=out,
            query_ptr=query_RAD,
            kv_ptrs=kv_ptrs,
            metadata_ptrs=metadata.tensors,
            parts_ptrs=parts,
            sinks_ptr=sinks,
            partition=plan.partition,
            window=Window(MANY if window is None else window, first_columns),
            extras=metadata.extra_slots.shape[1],
            num_requests=num_requests,
            pairs=plan.pairs,
            GROUP=plan.group,
            D=head_dim,
            ROPE_DIM=rope_dim,
            SCALE=scale,
            VALUE_SCALE=kv.value_scale,
            RAGGED=metadata.is_causal or window is not None,
            BLOCK_B=plan.block_b,
            BLOCK_M=plan.tiling.block_m,
            BLOCK_D=plan.block_d,
            BLOCK_ROPE=max(16, next_power_of_2(rope_dim)),
            BLOCK_C=plan.tiling.block_c,
            STAGES=plan.tiling.stages,
            DOT=plan.dot,
            num_warps=plan.tiling.warps,
            enable_fp_fusion=True,
        )
    if parts is not None:
        merge(out, parts, metadata, plan)
    return out
