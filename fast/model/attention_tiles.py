"""Tiles of keys, accumulated into an online softmax in the attention kernel."""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl

from specsim.fast.model.metadata import WORD


class HeadKV(NamedTuple):
    """Keys and values of one head, inside a kernel."""

    keys_ptr: tl.tensor
    values_ptr: tl.tensor
    stride_slot: tl.tensor


class Query(NamedTuple):
    """Queries of a block of pairs, inside a kernel."""

    plain: tl.tensor  # [BLOCK_M, BLOCK_D], the channels that meet a key's first D
    turned: tl.tensor  # [BLOCK_M, BLOCK_T], the others, where a key has more


class Prefix(NamedTuple):
    """A request's prefix, inside a kernel, with rows of a block seeing keys from `start` to `end`."""

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
def visible_prefix(table_ptr, columns, position, prefix_len, key_len, window, RAGGED: tl.constexpr):
    """Make the Prefix of a request for the rows of a block.

    RAGGED: rows may see different parts of it.
    """
    first = prefix_len
    start = 0
    end = key_len
    if RAGGED:
        first = tl.where(prefix_len > 0, tl.maximum(position - window + 1, 0), columns)  # of the window
        start = tl.min(first, axis=0)
        end = tl.max(prefix_len, axis=0)
    return Prefix(table_ptr, start, end, columns, first, prefix_len)


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
def _tile(query, kv, slot, loaded, D: tl.constexpr, TURNED: tl.constexpr):
    """Read a tile of keys and values: (logits [BLOCK_M, BLOCK_C], values [BLOCK_C, BLOCK_D])."""
    key = _read(kv.keys_ptr, slot, loaded, kv.stride_slot, query.plain, D)
    if TURNED > 0:
        turned = _read(kv.keys_ptr + D, slot, loaded, kv.stride_slot, query.turned, TURNED)
        logits = tl.dot(query.plain, tl.trans(key), input_precision="ieee")
        logits = tl.dot(query.turned, tl.trans(turned), logits, input_precision="ieee")
        value = key
    else:
        value = _read(kv.values_ptr, slot, loaded, kv.stride_slot, query.plain, D)
        logits = tl.dot(query.plain, tl.trans(key), input_precision="ieee")
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
    TURNED: tl.constexpr,
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
        logits, value = _tile(query, kv, slot, slot >= 0, D, TURNED)
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
    TURNED: tl.constexpr,
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
        total, top, acc, query, kv, prefix.table_ptr, low_whole, high_whole, scale, D, TURNED, BLOCK_C, STAGES
    )
    for edge in tl.range(low_tile, high_tile - (high_whole - low_whole), num_stages=1):
        tile = edge + tl.where(edge < low_whole, 0, high_whole - low_whole)
        column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
        slot = tl.load(prefix.table_ptr + 2 * column, mask=(column >= prefix.start) & (column < prefix.end), other=-1)
        logits, value = _tile(query, kv, slot, slot >= 0, D, TURNED)
        seen = (slot >= 0)[None, :]
        if RAGGED:
            seen = (column[None, :] >= prefix.first[:, None]) & (column[None, :] < prefix.seen[:, None])
        total, top, acc = _fold(total, top, acc, tl.where(seen, logits, float("-inf")), value, scale)
    dropped = prefix.seen == 0  # such a row has folded keys that it does not see
    return tl.where(dropped, 0.0, total), tl.where(dropped, float("-inf"), top), tl.where(dropped[:, None], 0.0, acc)


@triton.jit
@no_type_check
def fold_extras(total, top, acc, query, kv, extras, rows, low, high, scale, D: tl.constexpr, TURNED: tl.constexpr):
    """Add extra keys low..high, 32 at a time, reading only keys that some row sees."""
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
        logits, value = _tile(query, kv, slot, loaded, D, TURNED)
        total, top, acc = _fold(total, top, acc, tl.where(visible, logits, float("-inf")), value, scale)
    return total, top, acc
