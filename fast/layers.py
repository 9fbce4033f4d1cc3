"""The parts of a decoder layer: one product a projection, and one launch for what lies between two of them."""

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch.nn.functional import linear

from specsim.fast.attention import AttentionMetadata, attention, nearest
from specsim.fast.launch import block_of, kernel, require_contiguous
from specsim.pool import KVBuffer
from specsim.target import ModelConfig

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def _fused(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with projections of the same input stacked into one."""
    tensors = dict(tensors)
    for name in list(tensors):
        for whole, parts in FUSED.items():
            prefix, found, kind = name.rpartition(f"{parts[0]}.")
            if found and prefix[-1:] in ("", "."):
                tensors[f"{prefix}{whole}.{kind}"] = torch.cat(
                    [tensors.pop(f"{prefix}{part}.{kind}") for part in parts]
                )
    return tensors


class Weights:
    """Tensors by name, seen from below a prefix; `qkv_proj` and `gate_up_proj` stand for the projections they fuse."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str = ""):
        # Below a prefix they are fused already.
        self._tensors, self._prefix = tensors if prefix else _fused(tensors), prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(self._prefix + name)

    def under(self, prefix: str) -> "Weights":
        return Weights(self._tensors, f"{self._prefix}{prefix}.")

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))


@triton.jit
def _normed(x, mean_square, weight, eps, DTYPE: tl.constexpr):
    """x / √(mean x² + eps) · weight, rounded to DTYPE before the weight and after."""
    return nearest(weight.to(tl.float32) * nearest(x * tl.rsqrt(mean_square + eps), DTYPE).to(tl.float32), DTYPE)


@kernel
def _norm_kernel(
    out_ptr, sum_ptr, x_ptr, delta_ptr, weight_ptr, num_rows, size, eps, stride_x, stride_out,
    ADD: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    offs = tl.arange(0, BLOCK_H)[None, :]
    mask = (row < num_rows) & (offs < size)
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        delta = tl.load(delta_ptr + row * size + offs, mask=mask, other=0.0).to(tl.float32)
        total = nearest(x + delta, sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * size + offs, total, mask=mask)
        x = total.to(tl.float32)
    weight = tl.load(weight_ptr + offs, mask=offs < size, other=0.0)
    mean_square = tl.sum(x * x, axis=1, keep_dims=True) / size
    normed = _normed(x, mean_square, weight, eps, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * stride_out + offs, normed, mask=mask)


def _norm(out, total, x, delta, weight, eps: float) -> None:
    """Rows of x (plus delta, noted in total) to rows of out; only a row itself has to lie in one piece."""
    if any(rows.stride(-1) != 1 for rows in (x, out)):
        raise ValueError(f"rows have strides {x.stride()} and {out.stride()}; allowed: 1 along the last dimension")
    num_rows, size = x.shape
    block = block_of(num_rows, 1, size)
    _norm_kernel[(triton.cdiv(num_rows, block),)](
        out, total, x, delta, weight, num_rows, size, eps, x.stride(0), out.stride(0),
        ADD=delta is not x, BLOCK_R=block, BLOCK_H=triton.next_power_of_2(size),
    )  # fmt: skip


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """x / √(mean x² + eps) · weight of rows [R, H], in f32 (Zhang & Sennrich 2019); out may be columns of a wider."""
    out = torch.empty_like(x) if out is None else out
    _norm(out, out, x, x, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its rms_norm) of rows [R, H] in one launch."""
    require_contiguous(delta=delta)
    total, out = torch.empty_like(delta), torch.empty_like(delta)
    _norm(out, total, x, delta, weight, eps)
    return total, out


@kernel
def _add_kernel(out_ptr, x_ptr, delta_ptr, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    total = tl.load(x_ptr + offs, mask=mask).to(tl.float32) + tl.load(delta_ptr + offs, mask=mask).to(tl.float32)
    tl.store(out_ptr + offs, nearest(total, out_ptr.dtype.element_ty), mask=mask)


def add(x: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """x + delta."""
    require_contiguous(x=x, delta=delta)
    out, block = torch.empty_like(x), block_of(x.numel(), 1024)
    _add_kernel[(triton.cdiv(x.numel(), block),)](out, x, delta, x.numel(), BLOCK=block)
    return out


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


@triton.jit
def _turned(x, cos, y, sin, DTYPE: tl.constexpr):
    """x cos + y sin, every product and the sum rounded to DTYPE."""
    products = nearest(x * cos, DTYPE).to(tl.float32) + nearest(y * sin, DTYPE).to(tl.float32)
    return nearest(products, DTYPE)


@kernel
def _rotate_kernel(
    query_ptr, keys_ptr, values_ptr, qkv_ptr, q_norm_ptr, k_norm_ptr, inverse_ptr, positions_ptr, slots_ptr,
    num_rows, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pairs of a row and a head, each head as its two halves."""
    DTYPE: tl.constexpr = qkv_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    pair = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P).to(tl.int64)[:, None]
    row, head = pair // (HEADS + 2 * KV_HEADS), pair % (HEADS + 2 * KV_HEADS)
    mask_p, offs = row < num_rows, tl.arange(0, BLOCK_D)[None, :]
    mask_d = offs < HALF
    mask = mask_p & mask_d
    first = tl.load(qkv_ptr + pair * D + offs, mask=mask, other=0.0)
    second = tl.load(qkv_ptr + pair * D + HALF + offs, mask=mask, other=0.0)
    slot = tl.load(slots_ptr + row, mask=mask_p, other=-1)
    kept = mask & (slot >= 0)
    value_ptr = values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * D + offs
    is_value = kept & (head >= HEADS + KV_HEADS)
    tl.store(value_ptr, first, mask=is_value)
    tl.store(value_ptr + HALF, second, mask=is_value)

    first, second = first.to(tl.float32), second.to(tl.float32)
    if NORM:
        mean_square = tl.sum(first * first + second * second, axis=1, keep_dims=True) / D
        norm_ptr = tl.where(head < HEADS, q_norm_ptr, k_norm_ptr) + offs
        first = _normed(first, mean_square, tl.load(norm_ptr, mask=mask), eps, DTYPE)
        second = _normed(second, mean_square, tl.load(norm_ptr + HALF, mask=mask), eps, DTYPE)
    position = tl.load(positions_ptr + row, mask=mask_p, other=0).to(tl.float32)
    angle = position * tl.load(inverse_ptr + offs, mask=mask_d, other=0.0)
    cos, sin = nearest(tl.cos(angle), DTYPE).to(tl.float32), nearest(tl.sin(angle), DTYPE).to(tl.float32)
    first, second = _turned(first, cos, second, -sin, DTYPE), _turned(second, cos, first, sin, DTYPE)

    address = query_ptr + (row * HEADS + head) * D + offs
    is_query = mask & (head < HEADS)
    tl.store(address, first, mask=is_query)
    tl.store(address + HALF, second, mask=is_query)
    address = keys_ptr + (slot * KV_HEADS + head - HEADS) * D + offs
    is_key = kept & (head >= HEADS) & (head < HEADS + KV_HEADS)
    tl.store(address, first, mask=is_key)
    tl.store(address + HALF, second, mask=is_key)


def rotate_and_write(
    qkv_R: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    inverse_D: torch.Tensor,
    metadata: AttentionMetadata,
    kv: KVBuffer,
    layer: int,
    num_heads: int,
) -> torch.Tensor:
    """(Norm each head,) rotate queries and keys, write KV in one launch: [R, queries, keys, values] to query [R, A, D].

    Rotary embedding, halves convention: pairs are (i, i + D/2). Angles in float32, as the checkpoints were trained.
    """
    require_contiguous(qkv_R=qkv_R)
    num_rows, (kv_heads, head_dim) = len(qkv_R), kv.keys.shape[2:]
    query_RAD = qkv_R.new_empty(num_rows, num_heads, head_dim)
    pairs = num_rows * (num_heads + 2 * kv_heads)
    block = block_of(pairs, 16, head_dim)
    _rotate_kernel[(triton.cdiv(pairs, block),)](
        query_RAD, kv.keys[layer], kv.values[layer], qkv_R, qkv_R if q_norm is None else q_norm,
        qkv_R if k_norm is None else k_norm, inverse_D, metadata.positions, metadata.slots, num_rows, eps,
        HEADS=num_heads, KV_HEADS=kv_heads, D=head_dim, NORM=q_norm is not None,
        BLOCK_P=block, BLOCK_D=triton.next_power_of_2(head_dim // 2),
    )  # fmt: skip
    return query_RAD


@kernel
def _silu_mul_kernel(out_ptr, gate_up_ptr, count, size, BLOCK: tl.constexpr):
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    address = gate_up_ptr + offs // size * 2 * size + offs % size
    gate = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(address + size, mask=mask, other=0.0).to(tl.float32)
    shrunk = tl.exp(-tl.abs(gate))
    silu = nearest(gate * tl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk), DTYPE)
    tl.store(out_ptr + offs, nearest(silu.to(tl.float32) * up, DTYPE), mask=mask)


def silu_mul(gate_up_RI2: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up, [R, I], of gate and up side by side in [R, 2I]."""
    require_contiguous(gate_up_RI2=gate_up_RI2)
    num_rows, size = gate_up_RI2.shape[0], gate_up_RI2.shape[1] // 2
    out, block = gate_up_RI2.new_empty(num_rows, size), block_of(num_rows * size, 1024)
    _silu_mul_kernel[(triton.cdiv(out.numel(), block),)](out, gate_up_RI2, out.numel(), size, BLOCK=block)
    return out


def self_attention(
    x_RH: torch.Tensor,
    weights: Weights,
    config: ModelConfig,
    inverse_D: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Project, (norm each head,) rotate, write KV, attend, project back: [R, H]."""
    query_RAD = rotate_and_write(
        weights.project(x_RH, "qkv_proj"), weights.get("q_norm.weight"), weights.get("k_norm.weight"),
        config.rms_norm_eps, inverse_D, metadata, kv, layer, config.num_heads,
    )  # fmt: skip
    attended_RAD = attention(query_RAD, layer, kv, metadata, config.window(layer))
    return weights.project(attended_RAD.flatten(1), "o_proj")


def gated_mlp(x_RH: torch.Tensor, weights: Weights) -> torch.Tensor:
    """down(silu(gate x) · up x)."""
    return weights.project(silu_mul(weights.project(x_RH, "gate_up_proj")), "down_proj")
