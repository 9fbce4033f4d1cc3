"""The parts of a decoder layer: one product a projection, and one launch for what lies between two of them."""

import math
from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from specsim.fast.attention import attention
from specsim.fast.launch import await_input, block_of, kernel, nearest, require_contiguous
from specsim.fast.linear import Tiling, linear, linear_gated, linear_onto, streamed, streaming, tile_arguments
from specsim.fast.metadata import AttentionMetadata
from specsim.fast.rows import Rows, normalised
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
                tensors[f"{prefix}{whole}.{kind}"] = _stacked([tensors.pop(f"{prefix}{part}.{kind}") for part in parts])
    return tensors


def _stacked(parts: list[torch.Tensor]) -> torch.Tensor:
    """Rows of all parts; not copied where they lie one behind the other in one storage already."""
    first, ends = parts[0], [part.data_ptr() + part.nbytes for part in parts]
    is_whole = all(part.is_contiguous() for part in parts) and [part.data_ptr() for part in parts[1:]] == ends[:-1]
    if not is_whole or len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return torch.cat(parts)
    return first.as_strided((sum(map(len, parts)), *first.shape[1:]), first.stride())


class Weights:
    """Tensors by name, seen from below a prefix; `qkv_proj` and `gate_up_proj` stand for the projections they fuse.

    batch_invariant: whether a product's rows may not depend on how many there are.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str = "", batch_invariant: bool = False):
        # Below a prefix they are fused already.
        self._tensors, self._prefix = tensors if prefix else _fused(tensors), prefix
        self.batch_invariant = batch_invariant

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str) -> torch.Tensor | None:
        return self._tensors.get(self._prefix + name)

    def under(self, prefix: str) -> "Weights":
        return Weights(self._tensors, f"{self._prefix}{prefix}.", self.batch_invariant)

    def project(self, rows: Rows, name: str) -> torch.Tensor:
        """x Wᵀ (+ bias), [R, out]."""
        return linear(rows, *self._named(name), self.batch_invariant)

    def project_onto(self, base: Rows, rows: Rows, name: str, out: torch.Tensor | None = None) -> Rows:
        """base + x Wᵀ (+ bias), [R, out]."""
        return linear_onto(base, rows, *self._named(name), self.batch_invariant, out)

    def project_gated(self, rows: Rows, name: str) -> torch.Tensor:
        """silu(gate) · up, [R, out / 2], of a weight that stacks gate and up."""
        return linear_gated(rows, *self._named(name), self.batch_invariant)

    def _named(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self[f"{name}.weight"], self.get(f"{name}.bias")


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


@triton.jit
def _store_heads(
    query_ptr, keys_ptr, values_ptr, inverse_ptr, positions_ptr, slots_ptr, row, head, offs, first, second, mask,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Rotate the two halves of queries and keys, f32, and write queries to their rows, keys and values to their slots.

    row, head, offs (of a half): what broadcasts to the shape of first, second and mask; rows of slot -1 write no KV.
    """
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    slot = tl.load(slots_ptr + row, mask=mask, other=-1)
    position = tl.load(positions_ptr + row, mask=mask, other=0).to(tl.float32)
    kept = mask & (slot >= 0)
    address = values_ptr + (slot * KV_HEADS + head - HEADS - KV_HEADS) * D + offs
    is_value = kept & (head >= HEADS + KV_HEADS)
    tl.store(address, first.to(DTYPE), mask=is_value)
    tl.store(address + HALF, second.to(DTYPE), mask=is_value)
    angle = position * tl.load(inverse_ptr + offs, mask=offs < HALF, other=0.0)
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


@kernel
def _rotate_kernel(
    query_ptr, keys_ptr, values_ptr, qkv_ptr, q_norm_ptr, k_norm_ptr, inverse_ptr, positions_ptr, slots_ptr,
    num_rows, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
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
    _store_heads(
        query_ptr, keys_ptr, values_ptr, inverse_ptr, positions_ptr, slots_ptr, row, head, offs, first, second, mask,
        HEADS, KV_HEADS, D,
    )  # fmt: skip


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


@kernel
def _qkv_kernel(
    query_ptr, keys_ptr, values_ptr, x_ptr, squares_ptr, norm_ptr, w_ptr, bias_ptr, inverse_ptr, positions_ptr,
    slots_ptr, num_rows, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, STRIDE_X: tl.constexpr,
    K: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, DOT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some places of both halves of one head, for a block of rows."""
    DTYPE: tl.constexpr = query_ptr.dtype.element_ty
    HALF: tl.constexpr = D // 2
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    head, offs = tl.program_id(0) // (HALF // BLOCK_N), tl.program_id(0) % (HALF // BLOCK_N) * BLOCK_N
    offs += tl.arange(0, BLOCK_N)
    mask, output = row < num_rows, head * D + offs
    first, second = streamed(
        x_ptr, squares_ptr, norm_ptr, eps, w_ptr, row, mask, output, offs < HALF, STRIDE_X, K, HALF, PARTS, EVEN,
        BLOCK_M, BLOCK_N, BLOCK_K, STAGES, DOT, PDL,
    )  # fmt: skip
    if bias_ptr is not None:
        first += tl.load(bias_ptr + output).to(tl.float32)[None, :]
        second += tl.load(bias_ptr + output + HALF).to(tl.float32)[None, :]
    first, second = nearest(first, DTYPE).to(tl.float32), nearest(second, DTYPE).to(tl.float32)
    both = mask[:, None] & (offs < HALF)[None, :]
    _store_heads(
        query_ptr, keys_ptr, values_ptr, inverse_ptr, positions_ptr, slots_ptr, row[:, None], head, offs[None, :],
        first, second, both, HEADS, KV_HEADS, D,
    )  # fmt: skip


def _stream_qkv(
    tiling: Tiling, rows: Rows, weights: Weights, inverse_D, metadata: AttentionMetadata, kv: KVBuffer, layer: int,
    num_heads: int,
) -> torch.Tensor:  # fmt: skip
    """rotate_and_write fused to the product before it."""
    weight, x, (kv_heads, head_dim) = weights["qkv_proj.weight"], rows.values, kv.keys.shape[2:]
    query_RAD = x.new_empty(len(x), num_heads, head_dim)
    tiling = tiling._replace(block_n=tiling.block_n // 2)  # outputs of each half
    _qkv_kernel[len(weight) // 2 // tiling.block_n, triton.cdiv(len(x), tiling.block_m)](
        query_RAD, kv.keys[layer], kv.values[layer], x, rows.squares, rows.weight, weight, weights.get("qkv_proj.bias"),
        inverse_D, metadata.positions, metadata.slots, len(x), rows.eps, HEADS=num_heads,
        KV_HEADS=kv_heads, D=head_dim, **tile_arguments(tiling, rows, len(weight) // 2, weight.shape[1]),
    )  # fmt: skip
    return query_RAD


def _queries(
    rows: Rows, weights: Weights, config: ModelConfig, inverse_D, layer: int, kv: KVBuffer, metadata: AttentionMetadata
) -> torch.Tensor:
    """Rotated queries [R, A, D] of rows whose keys and values are written on the way."""
    norms = weights.get("q_norm.weight"), weights.get("k_norm.weight")
    tiling, rows = streaming(rows, weights["qkv_proj.weight"], weights.batch_invariant)
    if tiling and norms == (None, None) and config.head_dim % tiling.block_n == 0:
        return _stream_qkv(tiling, rows, weights, inverse_D, metadata, kv, layer, config.num_heads)
    qkv_R = weights.project(rows, "qkv_proj")
    return rotate_and_write(qkv_R, *norms, config.rms_norm_eps, inverse_D, metadata, kv, layer, config.num_heads)


def self_attention(
    base: Rows,
    rows: Rows,
    weights: Weights,
    config: ModelConfig,
    inverse_D: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
) -> Rows:
    """base + attention of rows: project, (norm each head,) rotate, write KV, attend, project back: [R, H]."""
    query_RAD = _queries(rows, weights, config, inverse_D, layer, kv, metadata)
    attended_RAD = attention(query_RAD, layer, kv, metadata, config.window(layer))
    return weights.project_onto(base, Rows(attended_RAD.flatten(1)), "o_proj")


def gated_mlp(base: Rows, rows: Rows, weights: Weights, out: torch.Tensor | None = None) -> Rows:
    """base + down(silu(gate x) · up x); out: where it goes, perhaps columns of a wider tensor."""
    return weights.project_onto(base, Rows(weights.project_gated(rows, "gate_up_proj")), "down_proj", out)
