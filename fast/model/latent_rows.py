"""Latent attention's keys and rotated query channels, written in one launch."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.model.metadata import KVTensors
from specsim.fast.model.rows import Norm, normalised
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


@triton.jit
@no_type_check
def _turn(from_ptr, to_ptr, cos, sin, pair, mask, scale, DTYPE: tl.constexpr):
    """Rotate channels 2i and 2i + 1 of from_ptr by angle i, products and sums rounded to DTYPE.

    scale: of to_ptr's numbers, where they are fp8.
    """
    first = tl.load(from_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    left = nearest(first * cos, DTYPE).to(tl.float32) - nearest(second * sin, DTYPE).to(tl.float32)
    right = nearest(second * cos, DTYPE).to(tl.float32) + nearest(first * sin, DTYPE).to(tl.float32)
    STORED: tl.constexpr = to_ptr.dtype.element_ty
    tl.store(to_ptr + 2 * pair, stored(nearest(left, DTYPE).to(tl.float32), scale, STORED), mask=mask)
    tl.store(to_ptr + 2 * pair + 1, stored(nearest(right, DTYPE).to(tl.float32), scale, STORED), mask=mask)


@kernel
@no_type_check
def _latent_kernel(
    query_ptr,
    keys_ptr,
    projected_ptr,
    latent_ptr,
    norm_ptr,
    turns_ptr,
    slots_ptr,
    num_rows,
    eps,
    key_scale,
    STRIDES_Q: tl.constexpr,
    STRIDES_P: tl.constexpr,
    STRIDE_L: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    await_input(PDL)
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    WIDTH: tl.constexpr = RANK + 2 * PAIRS
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    mask_r = row < num_rows
    pair = tl.arange(0, BLOCK_P)
    mask_p = mask_r[:, None] & (pair < PAIRS)[None, :]
    cos = tl.load(turns_ptr + 2 * row[:, None] * PAIRS + pair[None, :], mask=mask_p, other=0.0).to(tl.float32)
    sin = tl.load(turns_ptr + (2 * row[:, None] + 1) * PAIRS + pair[None, :], mask=mask_p, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + row, mask=mask_r, other=-1)
    kept = slot >= 0
    offs = tl.arange(0, BLOCK_L)
    mask = mask_r[:, None] & (offs < RANK)[None, :]
    latent = tl.load(latent_ptr + row[:, None] * STRIDE_L + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, axis=1, keep_dims=True) / RANK + eps)
    weight = tl.load(norm_ptr + offs, mask=offs < RANK, other=0.0)[None, :]
    normed = normalised(latent, scale, weight, DTYPE)
    normed = stored(normed.to(tl.float32), key_scale, keys_ptr.dtype.element_ty)
    tl.store(keys_ptr + slot[:, None] * WIDTH + offs[None, :], normed, mask=mask & kept[:, None])
    source = latent_ptr + row[:, None] * STRIDE_L + RANK
    _turn(
        source,
        keys_ptr + slot[:, None] * WIDTH + RANK,
        cos,
        sin,
        pair[None, :],
        mask_p & kept[:, None],
        key_scale,
        DTYPE,
    )
    head = tl.arange(0, BLOCK_A)[None, :, None]
    source = projected_ptr + row[:, None, None] * STRIDES_P[0] + head * STRIDES_P[1]
    target = query_ptr + row[:, None, None] * STRIDES_Q[0] + head * STRIDES_Q[1]
    mask_q = mask_p[:, None, :] & (head < HEADS)
    _turn(source, target, cos[:, None, :], sin[:, None, :], pair[None, None, :], mask_q, 1.0, DTYPE)


def write_latent(
    query_RAT: torch.Tensor,
    kv: KVTensors,
    projected_RAT: torch.Tensor,
    latent_R: torch.Tensor,
    norm: Norm,
    turns: torch.Tensor,
    slots_R: torch.Tensor,
) -> None:
    """Write rows' keys [normalised latent, rotated channels] to their slots, and rotate their query channels.

    kv: of a layer, with keys [slots, 1, rank + T]. latent_R: [R, rank + T], as projected. Rows may be slices of wider
    tensors. turns: [R, 2, T/2]. Rotary pairs are (2i, 2i + 1). Rows of slot -1 write no key.
    """
    require_contiguous(keys=kv.keys_ptr, turns=turns)
    for rows in (query_RAT, projected_RAT, latent_R):
        if rows.stride(-1) != 1:
            raise ValueError(f"rows have strides {rows.stride()}; allowed: 1 along the last dimension")
    num_rows, heads, turned = query_RAT.shape
    rank = latent_R.shape[1] - turned
    block_a, block_l, block_p = next_power_of_2(heads), next_power_of_2(rank), next_power_of_2(turned // 2)
    block = block_of(num_rows, 1, max(block_l, block_a * block_p))
    _latent_kernel[(ceil_div(num_rows, block),)](
        query_ptr=query_RAT,
        keys_ptr=kv.keys_ptr,
        projected_ptr=projected_RAT,
        latent_ptr=latent_R,
        norm_ptr=norm.weight,
        turns_ptr=turns,
        slots_ptr=slots_R,
        num_rows=num_rows,
        eps=norm.eps,
        key_scale=kv.key_scale,
        STRIDES_Q=query_RAT.stride(),
        STRIDES_P=projected_RAT.stride(),
        STRIDE_L=latent_R.stride(0),
        HEADS=heads,
        RANK=rank,
        PAIRS=turned // 2,
        BLOCK_R=block,
        BLOCK_A=block_a,
        BLOCK_L=block_l,
        BLOCK_P=block_p,
        num_warps=4,
    )
