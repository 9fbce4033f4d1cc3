"""Latent attention (DeepSeek-V2, arXiv 2405.04434), with the projection of keys and values absorbed.

Products of every head's channels with a weight of that head, and one kernel that writes keys and rotated queries.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.target import LatentAttention
from specsim.fast.attention import Scores, attention
from specsim.fast.layers import Weights
from specsim.fast.model.metadata import KVTensors
from specsim.fast.model.rotary import ForwardContext
from specsim.fast.model.rows import HiddenRows, Norm, normalised, rms_norm
from specsim.fast.runtime.launch import (
    INTERPRETED,
    await_input,
    block_of,
    ceil_div,
    dot_type,
    kernel,
    nearest,
    next_power_of_2,
    require_contiguous,
    stages_within,
    stored,
)

_EPS = 1e-6  # of the norms of latent vectors, whatever the model's


@triton.jit
@no_type_check
def _rotate_pairs(from_ptr, to_ptr, cos, sin, pair, mask, scale, DTYPE: tl.constexpr):
    """Rotate channels 2i and 2i + 1 of from_ptr by angle i, products and sums rounded to DTYPE.

    scale: of to_ptr's numbers, where they are fp8.
    """
    first = tl.load(from_ptr + 2 * pair, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(from_ptr + 2 * pair + 1, mask=mask, other=0.0).to(tl.float32)
    rotated_first = nearest(first * cos, DTYPE).to(tl.float32) - nearest(second * sin, DTYPE).to(tl.float32)
    right = nearest(second * cos, DTYPE).to(tl.float32) + nearest(first * sin, DTYPE).to(tl.float32)
    STORED: tl.constexpr = to_ptr.dtype.element_ty
    tl.store(to_ptr + 2 * pair, stored(nearest(rotated_first, DTYPE).to(tl.float32), scale, STORED), mask=mask)
    tl.store(to_ptr + 2 * pair + 1, stored(nearest(right, DTYPE).to(tl.float32), scale, STORED), mask=mask)


@kernel
@no_type_check
def _latent_kernel(
    query_ptr,
    keys_ptr,
    projected_ptr,
    latent_ptr,
    norm_ptr,
    cos_sin_ptr,
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
    cos = tl.load(cos_sin_ptr + 2 * row[:, None] * PAIRS + pair[None, :], mask=mask_p, other=0.0).to(tl.float32)
    sin = tl.load(cos_sin_ptr + (2 * row[:, None] + 1) * PAIRS + pair[None, :], mask=mask_p, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + row, mask=mask_r, other=-1)
    mask_slot = slot >= 0
    offs = tl.arange(0, BLOCK_L)
    mask = mask_r[:, None] & (offs < RANK)[None, :]
    latent = tl.load(latent_ptr + row[:, None] * STRIDE_L + offs[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(latent * latent, axis=1, keep_dims=True) / RANK + eps)
    weight = tl.load(norm_ptr + offs, mask=offs < RANK, other=0.0)[None, :]
    normed = normalised(latent, scale, weight, DTYPE)
    normed = stored(normed.to(tl.float32), key_scale, keys_ptr.dtype.element_ty)
    tl.store(keys_ptr + slot[:, None] * WIDTH + offs[None, :], normed, mask=mask & mask_slot[:, None])
    source = latent_ptr + row[:, None] * STRIDE_L + RANK
    _rotate_pairs(
        source,
        keys_ptr + slot[:, None] * WIDTH + RANK,
        cos,
        sin,
        pair[None, :],
        mask_p & mask_slot[:, None],
        key_scale,
        DTYPE,
    )
    head = tl.arange(0, BLOCK_A)[None, :, None]
    source = projected_ptr + row[:, None, None] * STRIDES_P[0] + head * STRIDES_P[1]
    target = query_ptr + row[:, None, None] * STRIDES_Q[0] + head * STRIDES_Q[1]
    mask_q = mask_p[:, None, :] & (head < HEADS)
    _rotate_pairs(source, target, cos[:, None, :], sin[:, None, :], pair[None, None, :], mask_q, 1.0, DTYPE)


def write_latent(
    query_RAT: torch.Tensor,
    kv: KVTensors,
    projected_RAT: torch.Tensor,
    latent_R: torch.Tensor,
    norm: Norm,
    cos_sin: torch.Tensor,
    slots_R: torch.Tensor,
) -> None:
    """Write rows' keys [normalised latent, rotated channels] to their slots, and rotate their query channels.

    kv: of a layer, with keys [slots, 1, rank + T]. latent_R: [R, rank + T], as projected. Rows may be slices of wider
    tensors. cos_sin: [R, 2, T/2]. Rotary pairs are (2i, 2i + 1). Rows of slot -1 write no key.
    """
    require_contiguous(keys=kv.keys_ptr, cos_sin=cos_sin)
    for rows in (query_RAT, projected_RAT, latent_R):
        if rows.stride(-1) != 1:
            raise ValueError(f"rows have strides {rows.stride()}; allowed: 1 along the last dimension")
    num_rows, heads, rope_dim = query_RAT.shape
    rank = latent_R.shape[1] - rope_dim
    block_a, block_l, block_p = next_power_of_2(heads), next_power_of_2(rank), next_power_of_2(rope_dim // 2)
    block = block_of(num_rows, 1, max(block_l, block_a * block_p))
    _latent_kernel[(ceil_div(num_rows, block),)](
        query_ptr=query_RAT,
        keys_ptr=kv.keys_ptr,
        projected_ptr=projected_RAT,
        latent_ptr=latent_R,
        norm_ptr=norm.weight,
        cos_sin_ptr=cos_sin,
        slots_ptr=slots_R,
        num_rows=num_rows,
        eps=norm.eps,
        key_scale=kv.key_scale,
        STRIDES_Q=query_RAT.stride(),
        STRIDES_P=projected_RAT.stride(),
        STRIDE_L=latent_R.stride(0),
        HEADS=heads,
        RANK=rank,
        PAIRS=rope_dim // 2,
        BLOCK_R=block,
        BLOCK_A=block_a,
        BLOCK_L=block_l,
        BLOCK_P=block_p,
        num_warps=4,
    )


@kernel
@no_type_check
def _head_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    num_rows,
    STRIDES_OUT: tl.constexpr,
    STRIDES_X: tl.constexpr,
    STRIDES_W: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    await_input(PDL)
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(2).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_m = (offs_m < num_rows)[:, None]
    mask_n = (offs_n < N)[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_ptr += head * STRIDES_X[1]
    weight_ptr += head * STRIDES_W[0]
    for first_k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        offs_k = first_k + tl.arange(0, BLOCK_K)
        inside = offs_k < K
        x = tl.load(x_ptr + offs_m[:, None] * STRIDES_X[0] + offs_k[None, :], mask=mask_m & inside[None, :], other=0.0)
        address = offs_k[:, None] * STRIDES_W[2] + offs_n[None, :] * STRIDES_W[1]
        w = tl.load(weight_ptr + address, mask=inside[:, None] & mask_n, other=0.0)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(x.to(DOT), w.to(DOT), acc, input_precision="ieee")
    address = offs_m[:, None] * STRIDES_OUT[0] + head * STRIDES_OUT[1] + offs_n[None, :]
    tl.store(out_ptr + address, nearest(acc, out_ptr.dtype.element_ty), mask=mask_m & mask_n)


def head_product(x_RAK: torch.Tensor, weight_ANK: torch.Tensor, out_RAN: torch.Tensor) -> None:
    """Compute Σ x[r, a, k] · weight[a, n, k] into out[r, a, n].

    All may be slices of wider tensors, and the weight transposed; only the last channels of x and out are adjacent. A
    row's result does not depend on the number of rows.
    """
    if x_RAK.stride(-1) != 1 or out_RAN.stride(-1) != 1:
        raise ValueError(f"strides are {x_RAK.stride()} and {out_RAN.stride()}; allowed: 1 along the last dimension")
    num_rows, heads, inner = x_RAK.shape
    size = weight_ANK.shape[1]
    block_m = max(16, min(64, next_power_of_2(num_rows)))
    block_n, block_k = (min(128, max(16, next_power_of_2(size))), 128) if INTERPRETED else (64, 64)
    block_k = min(max(16, next_power_of_2(inner)), block_k * 2 // x_RAK.itemsize)
    _head_kernel[ceil_div(size, block_n), heads, ceil_div(num_rows, block_m)](
        out_ptr=out_RAN,
        x_ptr=x_RAK,
        weight_ptr=weight_ANK,
        num_rows=num_rows,
        STRIDES_OUT=out_RAN.stride(),
        STRIDES_X=x_RAK.stride(),
        STRIDES_W=weight_ANK.stride(),
        N=size,
        K=inner,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=stages_within(3, (block_m + block_n) * block_k * x_RAK.itemsize),
        DOT=dot_type(x_RAK.dtype),
        num_warps=4,
    )


def latent_attention_residual(
    base: torch.Tensor,
    rows: HiddenRows,
    weights: Weights,
    attention_config: LatentAttention,
    layer: int,
    forward: ForwardContext,
    norm: Norm | None = None,
) -> HiddenRows:
    """Compute base + latent attention of rows, [R, H], write their KV, and prepare the next norm.

    Queries are multiplied by each head's key projection, so that all heads read the latent vectors as they are stored;
    what they read is multiplied by the head's value projection (DeepSeek-V2, arXiv 2405.04434).
    """
    num_rows = len(rows.values)
    projected_RAQ, latent_RL = _latent_projections(rows, weights, attention_config)
    key_weight, value_weight = (
        weights["kv_b_proj.weight"]
        .view(attention_config.num_heads, -1, attention_config.latent_rank)
        .split([attention_config.nope_dim, attention_config.value_dim], dim=1)
    )
    query_RAL = projected_RAQ.new_empty(
        num_rows, attention_config.num_heads, attention_config.latent_rank + attention_config.rope_dim
    )
    head_product(
        projected_RAQ[..., : attention_config.nope_dim],
        key_weight.transpose(1, 2),
        query_RAL[..., : attention_config.latent_rank],
    )
    write_latent(
        query_RAL[..., attention_config.latent_rank :],
        forward.layer_kv(layer),
        projected_RAQ[..., attention_config.nope_dim :],
        latent_RL,
        Norm(weights["kv_a_layernorm.weight"], _EPS),
        forward.cos_sin,
        forward.metadata.slots,
    )
    scores = Scores(
        attention_config.window,
        scale=attention_config.scale,
        rope_dim=attention_config.rope_dim,
        first_columns=attention_config.first_columns,
    )
    invariant = weights.batch_invariant
    read_RAL = attention(query_RAL, layer, forward.kv, forward.metadata, scores, invariant=invariant)
    out_RAV = read_RAL.new_empty(num_rows, attention_config.num_heads, attention_config.value_dim)
    head_product(read_RAL, value_weight, out_RAV)
    return weights.project_residual(base, HiddenRows(out_RAV.flatten(1)), "o_proj", norm)


def _latent_projections(
    rows: HiddenRows, weights: Weights, attention_config: LatentAttention
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project rows to queries [R, A, nope + rope] and latent vectors with the rotated channels, [R, rank + rope]."""
    if attention_config.query_rank is None:
        ready = HiddenRows(rows.normed())
        query_R = weights.project(ready, "q_proj")
        latent_RL = weights.project(ready, "kv_a_proj_with_mqa")
    else:
        both_R = weights.project(rows, "qkv_a_proj")
        latent_RL = both_R[:, attention_config.query_rank :]
        compressed = rms_norm(both_R[:, : attention_config.query_rank], weights["q_a_layernorm.weight"], _EPS)
        query_R = weights.project(HiddenRows(compressed), "q_b_proj")
    return query_R.unflatten(-1, (attention_config.num_heads, -1)), latent_RL
