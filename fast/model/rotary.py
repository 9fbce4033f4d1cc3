"""Rotary positions: angles once a forward; queries, keys and values from their projection to their places."""

import math

import torch
import triton
import triton.language as tl

from specsim.core.pool import KVBuffer
from specsim.core.target import ModelConfig
from specsim.fast.model.linear import Tiling, eps_of, factor, scale_of, squares_of, streamed, tile_arguments
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.model.rows import Rows, normalised
from specsim.fast.runtime.launch import (
    await_input,
    await_predecessor,
    block_of,
    kernel,
    let_successor_begin,
    nearest,
    require_contiguous,
)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Rotary frequencies f32 [D/2]; rope type llama3 stretches the long wavelengths (Llama 3.1)."""
    inverse = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    scaling = config.rope_scaling
    if scaling.get("rope_type", "default") == "default":
        return inverse
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return share * inverse + (1 - share) * inverse / factor


@kernel
def _angles_kernel(out_ptr, positions_ptr, inverse_ptr, num_rows, HALF: tl.constexpr, BLOCK: tl.constexpr,
                   PDL: tl.constexpr):  # fmt: skip
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    row, place, mask = offs // HALF, offs % HALF, offs < num_rows * HALF
    position = tl.load(positions_ptr + row, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(inverse_ptr + place, mask=mask, other=0.0)
    tl.store(out_ptr + 2 * row * HALF + place, nearest(tl.cos(angle), DTYPE), mask=mask)
    tl.store(out_ptr + (2 * row + 1) * HALF + place, nearest(tl.sin(angle), DTYPE), mask=mask)


def rotations(positions_R: torch.Tensor, inverse_D: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cosines and sines of rows' angles, [R, 2, D/2], once a forward; angles in float32, as models are trained."""
    out = positions_R.new_empty(len(positions_R), 2, len(inverse_D), dtype=dtype)
    count = len(positions_R) * len(inverse_D)
    block = block_of(count, 256)
    _angles_kernel[(triton.cdiv(count, block),)](
        out, positions_R, inverse_D, len(positions_R), HALF=len(inverse_D), BLOCK=block
    )
    return out


@triton.jit
def _turned(x, cos, y, sin, DTYPE: tl.constexpr):
    """x cos + y sin, every product and the sum rounded to DTYPE."""
    products = nearest(x * cos, DTYPE).to(tl.float32) + nearest(y * sin, DTYPE).to(tl.float32)
    return nearest(products, DTYPE)


@triton.jit
def _turns_of(turns_ptr, slots_ptr, row, offs, mask, HALF: tl.constexpr):
    """(cosines, sines, slots) of rows at places of a half."""
    cos = tl.load(turns_ptr + 2 * row * HALF + offs, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(turns_ptr + (2 * row + 1) * HALF + offs, mask=mask, other=0.0).to(tl.float32)
    return cos, sin, tl.load(slots_ptr + row, mask=mask, other=-1)


@triton.jit
def _store_heads(
    query_ptr, keys_ptr, values_ptr, turns, row, head, offs, first, second, mask,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rotate the two halves of queries and keys, f32, and write queries to their rows, keys and values to their slots.

    turns: as of _turns_of. row, head, offs (of a half): what broadcasts to the shape of first, second and mask. Rows of
    slot -1 write no KV.
    """
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    cos, sin, slot = turns
    kept = mask & (slot >= 0)
    address = values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * D + offs
    is_value = kept & (head >= HEADS + KV_HEADS)
    tl.store(address, first.to(DTYPE), mask=is_value)
    tl.store(address + HALF, second.to(DTYPE), mask=is_value)
    first, second = _turned(first, cos, second, -sin, DTYPE), _turned(second, cos, first, sin, DTYPE)
    address = query_ptr + (row * HEADS + head) * D + offs
    is_query = mask & (head < HEADS)
    tl.store(address, first, mask=is_query)
    tl.store(address + HALF, second, mask=is_query)
    address = keys_ptr + (slot * KV_HEADS + head - HEADS) * D + offs
    is_key = kept & (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(address, first, mask=is_key)
    tl.store(address + HALF, second, mask=is_key)


@kernel
def _rotate_kernel(
    query_ptr, keys_ptr, values_ptr, qkv_ptr, q_norm_ptr, k_norm_ptr, turns_ptr, slots_ptr, num_rows, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pairs of a row and a head, each head as its two halves."""
    await_input(PDL)
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
    row, head = pair // (HEADS + 2 * KV_HEADS), pair % (HEADS + 2 * KV_HEADS)
    offs = tl.arange(0, BLOCK_D)[None, :]
    mask = (row < num_rows) & (offs < HALF)
    first = tl.load(qkv_ptr + pair * D + offs, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + pair * D + HALF + offs, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1, keep_dims=True) / D + eps)
        norm_ptr = tl.where(head < HEADS, q_norm_ptr, k_norm_ptr) + offs
        is_value = head >= HEADS + KV_HEADS
        normed = normalised(first, scale, tl.load(norm_ptr, mask=mask, other=0.0), DTYPE).to(tl.float32)
        first = tl.where(is_value, first, normed)
        normed = normalised(second, scale, tl.load(norm_ptr + HALF, mask=mask, other=0.0), DTYPE).to(tl.float32)
        second = tl.where(is_value, second, normed)
    turns = _turns_of(turns_ptr, slots_ptr, row, offs, mask, HALF)
    _store_heads(query_ptr, keys_ptr, values_ptr, turns, row, head, offs, first, second, mask, HEADS, KV_HEADS, D)


def rotate_and_write(
    qkv_R: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    turns: torch.Tensor,
    metadata: AttentionMetadata,
    kv: KVBuffer,
    layer: int,
    num_heads: int,
) -> torch.Tensor:
    """(Norm each head,) rotate queries and keys, write KV in one launch: [R, queries, keys, values] to query [R, A, D].

    Rotary embedding, halves convention: pairs are (i, i + D/2). turns: as of `rotations`.
    """
    require_contiguous(qkv_R=qkv_R)
    num_rows, (kv_heads, head_dim) = len(qkv_R), kv.keys.shape[2:]
    query_RAD = qkv_R.new_empty(num_rows, num_heads, head_dim)
    pairs = num_rows * (num_heads + 2 * kv_heads)
    block = block_of(pairs, 16, head_dim)
    _rotate_kernel[(triton.cdiv(pairs, block),)](
        query_RAD, kv.keys[layer], kv.values[layer], qkv_R, qkv_R if q_norm is None else q_norm,
        qkv_R if k_norm is None else k_norm, turns, metadata.slots, num_rows, eps,
        HEADS=num_heads, KV_HEADS=kv_heads, D=head_dim, NORM=q_norm is not None,
        BLOCK_P=block, BLOCK_D=triton.next_power_of_2(head_dim // 2),
    )  # fmt: skip
    return query_RAD


@kernel
def _qkv_kernel(
    query_ptr, keys_ptr, values_ptr, x_ptr, squares_ptr, w_ptr, bias_ptr, turns_ptr, slots_ptr, num_rows, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, STRIDE_X: tl.constexpr, K: tl.constexpr,
    PARTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some places of both halves of one head, for a block of rows."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    head, offs = tl.program_id(0) // (HALF // BLOCK_N), tl.program_id(0) % (HALF // BLOCK_N) * BLOCK_N
    offs += tl.arange(0, BLOCK_N)
    mask_m, output, is_place = row < num_rows, head * D + offs, offs < HALF
    mask = mask_m[:, None] & is_place[None, :]
    await_predecessor(PDL)
    if PARTS > 0:
        squares = squares_of(squares_ptr, row, mask_m, PARTS)
    turns = _turns_of(turns_ptr, slots_ptr, row[:, None], offs[None, :], mask, HALF)
    first, second = streamed(
        x_ptr, w_ptr, row, mask_m, output, is_place, STRIDE_X, K, HALF, EVEN, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT
    )
    let_successor_begin(PDL)
    if PARTS > 0:
        scale = scale_of(squares, eps, K)
        first, second = first * scale, second * scale
    if bias_ptr is not None:
        first += tl.load(bias_ptr + output).to(tl.float32)[None, :]
        second += tl.load(bias_ptr + output + HALF).to(tl.float32)[None, :]
    first, second = nearest(first, DTYPE).to(tl.float32), nearest(second, DTYPE).to(tl.float32)
    _store_heads(
        query_ptr, keys_ptr, values_ptr, turns, row[:, None], head, offs[None, :], first, second, mask, HEADS, KV_HEADS,
        D,
    )  # fmt: skip


def project_rotate_and_write(
    tiling: Tiling,
    rows: Rows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    turns: torch.Tensor,
    metadata: AttentionMetadata,
    kv: KVBuffer,
    layer: int,
    num_heads: int,
) -> torch.Tensor:
    """rotate_and_write, without norms of heads, fused to the product with the projections' weight and bias."""
    require_contiguous(weight=weight, bias=bias)
    x, (kv_heads, head_dim) = factor(rows), kv.keys.shape[2:]
    query_RAD = x.new_empty(len(x), num_heads, head_dim)
    tiling = tiling._replace(block_n=tiling.block_n // 2)  # outputs of each half
    _qkv_kernel[len(weight) // 2 // tiling.block_n, triton.cdiv(len(x), tiling.block_m)](
        query_RAD, kv.keys[layer], kv.values[layer], x, rows.squares, weight, bias, turns,
        metadata.slots, len(x), eps_of(rows), HEADS=num_heads, KV_HEADS=kv_heads, D=head_dim,
        **tile_arguments(tiling, rows, len(weight) // 2, weight.shape[1], 2),
    )  # fmt: skip
    return query_RAD
