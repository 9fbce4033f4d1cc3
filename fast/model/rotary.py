"""Rotary embedding: angles once a forward, and one kernel that rotates and writes queries, keys and values."""

import math
from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.pool import KVBuffer
from specsim.core.target import Rope
from specsim.fast.model.metadata import AttentionMetadata, KVTensors
from specsim.fast.model.rows import normalised
from specsim.fast.runtime.launch import (
    await_input,
    block_of,
    ceil_div,
    kernel,
    nearest,
    next_power_of_2,
    require_contiguous,
    stored,
)


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """Rotary frequencies f32 [D/2].

    Rope type llama3 stretches long wavelengths (Llama 3.1), as yarn does (arXiv 2309.00071).
    """
    inverse = 1.0 / rope.theta ** (torch.arange(0, rope.size, 2).float() / rope.size)
    scaling = rope.scaling
    if scaling.get("rope_type", "default") == "default":
        return inverse
    factor = scaling["factor"]
    if scaling["rope_type"] == "yarn":
        return inverse * (1 - _yarn_ramp(rope) * (1 - 1 / factor))
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    cycles = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    share = ((cycles - low) / (high - low)).clamp(0, 1)
    return share * inverse + (1 - share) * inverse / factor


def _yarn_ramp(rope: Rope) -> torch.Tensor:
    """Share in which each wavelength is stretched, f32 [D/2].

    It grows from 0 at the pair that turns beta_fast times in the original context to 1 at that of beta_slow turns.
    """
    radians = rope.scaling["original_max_position_embeddings"] / (2 * math.pi)
    ends = [
        rope.size / 2 * math.log(radians / rope.scaling[name]) / math.log(rope.theta)
        for name in ("beta_fast", "beta_slow")
    ]
    if rope.scaling["truncate"]:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    first, last = max(ends[0], 0), min(ends[1], rope.size - 1)
    return ((torch.arange(rope.size // 2).float() - first) / (last - first or 0.001)).clamp(0, 1)


@kernel
@no_type_check
def _angles_kernel(
    out_ptr, positions_ptr, inverse_ptr, amplitude, num_rows, HALF: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    row = offs // HALF
    pair = offs % HALF
    mask = offs < num_rows * HALF
    position = tl.load(positions_ptr + row, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(inverse_ptr + pair, mask=mask, other=0.0)
    tl.store(out_ptr + 2 * row * HALF + pair, nearest(tl.cos(angle) * amplitude, DTYPE), mask=mask)
    tl.store(out_ptr + (2 * row + 1) * HALF + pair, nearest(tl.sin(angle) * amplitude, DTYPE), mask=mask)


def rotations(
    positions_R: torch.Tensor, inverse_D: torch.Tensor, dtype: torch.dtype, amplitude: float = 1.0
) -> torch.Tensor:
    """Compute cosines and sines of rows' angles, [R, 2, D/2], once a forward, with float32 angles as in training.

    amplitude: factor of both.
    """
    out = positions_R.new_empty(len(positions_R), 2, len(inverse_D), dtype=dtype)
    count = len(positions_R) * len(inverse_D)
    block = block_of(count, 256)
    _angles_kernel[(ceil_div(count, block),)](
        out_ptr=out,
        positions_ptr=positions_R,
        inverse_ptr=inverse_D,
        amplitude=amplitude,
        num_rows=len(positions_R),
        HALF=len(inverse_D),
        BLOCK=block,
    )
    return out


class HeadNorms(NamedTuple):
    """Weights of the query and key norms of each head."""

    query: torch.Tensor  # [D]
    key: torch.Tensor  # [D]


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward of a model, with everything that its attention layers share."""

    cos_sin: torch.Tensor  # [R, 2, D/2], as of `rotations`
    metadata: AttentionMetadata
    kv: KVBuffer

    def layer_kv(self, layer: int) -> KVTensors:
        """Return the KV of a layer, [slots, heads, D]."""
        return KVTensors.of(self.kv, layer)


class Rotation(NamedTuple):
    """Rotations of a tile inside a kernel, and the slots of its rows."""

    cos: tl.tensor  # f32
    sin: tl.tensor  # f32
    slot: tl.tensor  # i64, -1 for a row that writes no KV


@triton.jit
@no_type_check
def _rotated(x, cos, y, sin, DTYPE: tl.constexpr):
    """Compute x cos + y sin, each product and the sum rounded to DTYPE."""
    products = nearest(x * cos, DTYPE).to(tl.float32) + nearest(y * sin, DTYPE).to(tl.float32)
    return nearest(products, DTYPE)


@triton.jit
@no_type_check
def load_cos_sin(cos_sin_ptr, slots_ptr, row, offs, mask, HALF: tl.constexpr):
    """Load the rotations of rows at some dimensions of half a head."""
    cos = tl.load(cos_sin_ptr + 2 * row * HALF + offs, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + (2 * row + 1) * HALF + offs, mask=mask, other=0.0).to(tl.float32)
    return Rotation(cos, sin, tl.load(slots_ptr + row, mask=mask, other=-1))


@triton.jit
@no_type_check
def store_heads(
    query_ptr,
    kv_ptrs,
    rotation,
    row,
    head,
    offs,
    first,
    second,
    mask,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
):
    """Rotate both halves of queries and keys, f32, and write queries to rows, keys and values to slots.

    row, head and offs (in a half) broadcast to the shape of first, second, mask and the rotations. Rows of slot -1
    write no KV.
    """
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    slot = rotation.slot
    mask_kv = mask & (slot >= 0)
    address = kv_ptrs.values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * D + offs
    is_value = mask_kv & (head >= HEADS + KV_HEADS)
    KV_DTYPE: tl.constexpr = kv_ptrs.keys_ptr.dtype.element_ty
    tl.store(address, stored(first, kv_ptrs.value_scale, KV_DTYPE), mask=is_value)
    tl.store(address + HALF, stored(second, kv_ptrs.value_scale, KV_DTYPE), mask=is_value)
    rotated = _rotated(first, rotation.cos, second, -rotation.sin, DTYPE)
    second = _rotated(second, rotation.cos, first, rotation.sin, DTYPE)
    first = rotated
    address = query_ptr + (row * HEADS + head) * D + offs
    is_query = mask & (head < HEADS)
    tl.store(address, first, mask=is_query)
    tl.store(address + HALF, second, mask=is_query)
    address = kv_ptrs.keys_ptr + (slot * KV_HEADS + head - HEADS) * D + offs
    is_key = mask_kv & (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(address, stored(first.to(tl.float32), kv_ptrs.key_scale, KV_DTYPE), mask=is_key)
    tl.store(address + HALF, stored(second.to(tl.float32), kv_ptrs.key_scale, KV_DTYPE), mask=is_key)


@kernel
@no_type_check
def _rotate_kernel(
    query_ptr,
    kv_ptrs,
    qkv_ptr,
    norm_ptrs,
    cos_sin_ptr,
    slots_ptr,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rotate and write pairs of a row and a head, each head in its two halves."""
    await_input(PDL)
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
    row = pair // (HEADS + 2 * KV_HEADS)
    head = pair % (HEADS + 2 * KV_HEADS)
    offs = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < num_rows) & (offs < HALF)
    first = tl.load(qkv_ptr + pair * D + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_P, BLOCK_D]
    second = tl.load(qkv_ptr + pair * D + HALF + offs, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1, keep_dims=True) / D + eps)
        norm_ptr = tl.where(head < HEADS, norm_ptrs.query, norm_ptrs.key) + offs
        is_value = head >= HEADS + KV_HEADS
        normed = normalised(first, scale, tl.load(norm_ptr, mask=mask, other=0.0), DTYPE).to(tl.float32)
        first = tl.where(is_value, first, normed)
        normed = normalised(second, scale, tl.load(norm_ptr + HALF, mask=mask, other=0.0), DTYPE).to(tl.float32)
        second = tl.where(is_value, second, normed)
    rotation = load_cos_sin(cos_sin_ptr, slots_ptr, row, offs, mask, HALF)
    store_heads(query_ptr, kv_ptrs, rotation, row, head, offs, first, second, mask, HEADS, KV_HEADS, D)


def rotate_and_write(
    qkv_R: torch.Tensor,
    norms: HeadNorms | None,
    eps: float,
    forward: ForwardContext,
    layer: int,
    num_heads: int,
    writes_kv: bool = True,
) -> torch.Tensor:
    """Normalise each head where there are norms, rotate queries and keys, and write KV, in one launch.

    [R, queries, keys, values], without writes_kv [R, queries], becomes query [R, A, D]. Rotary pairs are (i, i + D/2).
    """
    require_contiguous(qkv_R=qkv_R)
    kv = forward.layer_kv(layer)
    num_rows = len(qkv_R)
    kv_heads, head_dim = kv.keys_ptr.shape[1:]
    kv_heads = kv_heads if writes_kv else 0
    query_RAD = qkv_R.new_empty(num_rows, num_heads, head_dim)
    pairs = num_rows * (num_heads + 2 * kv_heads)
    block = block_of(pairs, 16, head_dim)
    _rotate_kernel[(ceil_div(pairs, block),)](
        query_ptr=query_RAD,
        kv_ptrs=kv,
        qkv_ptr=qkv_R,
        norm_ptrs=HeadNorms(qkv_R, qkv_R) if norms is None else norms,
        cos_sin_ptr=forward.cos_sin,
        slots_ptr=forward.metadata.slots,
        num_rows=num_rows,
        eps=eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        D=head_dim,
        NORM=norms is not None,
        BLOCK_P=block,
        BLOCK_D=next_power_of_2(head_dim // 2),
    )
    return query_RAD
