"""Rows of hidden states, and operations on single rows: norms, sums, gates."""

from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.runtime.launch import (
    await_input,
    block_of,
    ceil_div,
    kernel,
    nearest,
    next_power_of_2,
    require_contiguous,
)


class Norm(NamedTuple):
    """An RMS norm."""

    weight: torch.Tensor  # [H]
    eps: float


class RowOutputs(NamedTuple):
    """Rows that a kernel writes, with what their next norm needs, if there is one (see HiddenRows)."""

    rows: torch.Tensor  # [R, N]
    weighted: torch.Tensor | None
    squares: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Rows of a hidden state, with a norm that their next product has to apply."""

    values: torch.Tensor  # [R, H]
    norm: Norm | None = None  # None: under no norm
    # Both are None where the rows' writer has not prepared the norm.
    weighted: torch.Tensor | None = None  # [R, H], the rows times the norm's weight
    squares: torch.Tensor | None = None  # f32 [R, parts], which add up to the sum of a row's squares

    @classmethod
    def to_write(cls, values: torch.Tensor, norm: Norm | None, parts: int) -> Self:
        """Allocate what a norm needs, but not in float16, where a row times a weight may overflow."""
        if norm is None or values.dtype == torch.float16:
            return cls(values, norm)
        num_rows, size = values.shape
        squares = values.new_empty(num_rows, parts, dtype=torch.float32)
        return cls(values, norm, values.new_empty(num_rows, size), squares)

    @property
    def factor(self) -> torch.Tensor:
        """Left factor of a product, [R, H]: the rows without their norm's scale."""
        return self.values if self.weighted is None else self.weighted

    @property
    def outputs(self) -> RowOutputs:
        """The rows as kernel arguments, for their writer."""
        return RowOutputs(self.values, self.weighted, self.squares)

    @property
    def eps(self) -> float:
        """Epsilon of the norm, 0 where there is none."""
        return 0.0 if self.norm is None else self.norm.eps

    @property
    def next_weight(self) -> torch.Tensor | None:
        """Weight of the norm, where the rows' writer prepares it."""
        return None if self.norm is None or self.weighted is None else self.norm.weight

    def normed(self) -> torch.Tensor:
        """Apply the norm now, [R, H]."""
        return self.values if self.norm is None else rms_norm(self.values, *self.norm)


@triton.jit
@no_type_check
def normalised(x, scale, weight, DTYPE: tl.constexpr):
    """Compute x · scale · weight, rounded to DTYPE before and after the weight."""
    return nearest(weight.to(tl.float32) * nearest(x.to(tl.float32) * scale, DTYPE).to(tl.float32), DTYPE)


@triton.jit
@no_type_check
def store_sums(
    out_ptrs,
    total,
    base_ptr,
    norm_ptr,
    row,
    num_rows,
    size,
    STRIDE_OUT: tl.constexpr,
    STRIDE_BASE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add the base to rows of sums, f32, write them, and prepare the next norm."""
    offs = tl.arange(0, total.shape[1])[None, :]
    mask_r = row < num_rows
    mask = mask_r[:, None] & (offs < size)
    total = nearest(total, DTYPE).to(tl.float32)
    if base_ptr is not None:
        base = tl.load(base_ptr + row[:, None] * STRIDE_BASE + offs, mask=mask, other=0.0).to(tl.float32)
        total = nearest(base + total, DTYPE).to(tl.float32)
    tl.store(out_ptrs.rows + row[:, None] * STRIDE_OUT + offs, nearest(total, DTYPE), mask=mask)
    if norm_ptr is not None:
        weight = tl.load(norm_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
        tl.store(out_ptrs.weighted + row[:, None] * size + offs, nearest(total * weight, DTYPE), mask=mask)
        tl.store(out_ptrs.squares + row, tl.sum(total * total, axis=1), mask=mask_r)


@kernel
@no_type_check
def _norm_kernel(
    out_ptr,
    x_ptr,
    ids_ptr,
    weight_ptr,
    num_rows,
    size,
    eps,
    stride_out,
    stride_x,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)[:, None]
    offs = tl.arange(0, BLOCK_H)[None, :]
    mask = (row < num_rows) & (offs < size)
    weight = tl.load(weight_ptr + offs, mask=offs < size, other=0.0)
    await_input(PDL)
    source = row if ids_ptr is None else tl.load(ids_ptr + row, mask=row < num_rows, other=0)
    x = tl.load(x_ptr + source * stride_x + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_R, BLOCK_H]
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / size + eps)
    tl.store(out_ptr + row * stride_out + offs, normalised(x, scale, weight, out_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    ids_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute x / √(mean x² + eps) · weight of rows [R, H], in f32 (Zhang & Sennrich 2019).

    ids_R: indices into x, which is then a table. out may be a slice of a wider tensor.
    """
    out = x.new_empty(len(x) if ids_R is None else len(ids_R), x.shape[1]) if out is None else out
    if any(rows.stride(-1) != 1 for rows in (x, out)):
        raise ValueError(f"rows have strides {x.stride()} and {out.stride()}; allowed: 1 along the last dimension")
    num_rows, size = out.shape
    block = block_of(num_rows, 1, size)
    _norm_kernel[(ceil_div(num_rows, block),)](
        out_ptr=out,
        x_ptr=x,
        ids_ptr=ids_R,
        weight_ptr=weight,
        num_rows=num_rows,
        size=size,
        eps=eps,
        stride_out=out.stride(0),
        stride_x=x.stride(0),
        BLOCK_R=block,
        BLOCK_H=next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
    return out


@kernel
@no_type_check
def _embed_kernel(
    out_ptr,
    weighted_ptr,
    squares_ptr,
    table_ptr,
    ids_ptr,
    norm_ptr,
    first_token,
    num_tokens,
    num_rows,
    size,
    stride_out,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    await_input(PDL)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R).to(tl.int64)
    offs = tl.arange(0, BLOCK_H)
    mask_r = row < num_rows
    mask = mask_r[:, None] & (offs < size)[None, :]
    source = tl.load(ids_ptr + row, mask=mask_r, other=0) - first_token
    mask_token = mask & ((source >= 0) & (source < num_tokens))[:, None]
    x = tl.load(table_ptr + source[:, None] * size + offs[None, :], mask=mask_token, other=0.0)  # [BLOCK_R, BLOCK_H]
    tl.store(out_ptr + row[:, None] * stride_out + offs[None, :], x, mask=mask)
    if norm_ptr is not None:
        x = x.to(tl.float32)
        weight = tl.load(norm_ptr + offs, mask=offs < size, other=0.0).to(tl.float32)
        weighted = nearest(x * weight[None, :], weighted_ptr.dtype.element_ty)
        tl.store(weighted_ptr + row[:, None] * size + offs[None, :], weighted, mask=mask)
        tl.store(squares_ptr + row, tl.sum(x * x, axis=1), mask=mask_r)


def embed(
    ids_R: torch.Tensor,
    table_VH: torch.Tensor,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
    first_token: int = 0,
) -> HiddenRows:
    """Look up rows of an embedding table, and prepare the next norm.

    out may be a slice of a wider tensor. first_token: of the table, which has rows of zeros for tokens outside it.
    """
    require_contiguous(table_VH=table_VH)
    num_rows = len(ids_R)
    size = table_VH.shape[1]
    out = table_VH.new_empty(num_rows, size) if out is None else out
    rows = HiddenRows.to_write(out, norm, 1)
    block = block_of(num_rows, 1, size)
    _embed_kernel[(ceil_div(num_rows, block),)](
        out_ptr=out,
        weighted_ptr=rows.weighted,
        squares_ptr=rows.squares,
        table_ptr=table_VH,
        ids_ptr=ids_R,
        norm_ptr=rows.next_weight,
        first_token=first_token,
        num_tokens=len(table_VH),
        num_rows=num_rows,
        size=size,
        stride_out=out.stride(0),
        BLOCK_R=block,
        BLOCK_H=next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )
    return rows


@kernel
@no_type_check
def _add_kernel(
    out_ptr, x_ptr, delta_ptr, num_rows, size, stride_out, stride_x, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_input(PDL)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_rows * size
    row = offs // size
    column = offs % size
    x = tl.load(x_ptr + row * stride_x + column, mask=mask, other=0.0).to(tl.float32)
    total = x + tl.load(delta_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + column, nearest(total, out_ptr.dtype.element_ty), mask=mask)


def add(x: torch.Tensor, delta: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute x + delta, rows [R, H].

    x and out may be slices of wider tensors.
    """
    require_contiguous(delta=delta)
    out = torch.empty_like(delta) if out is None else out
    block = block_of(delta.numel(), 1024)
    _add_kernel[(ceil_div(delta.numel(), block),)](
        out_ptr=out,
        x_ptr=x,
        delta_ptr=delta,
        num_rows=delta.shape[0],
        size=delta.shape[1],
        stride_out=out.stride(0),
        stride_x=x.stride(0),
        BLOCK=block,
    )
    return out


@triton.jit
@no_type_check
def gated(gate, up, DTYPE: tl.constexpr):
    """Compute silu(gate) · up, f32, rounded to DTYPE as a library's three operations are, but for the last rounding."""
    gate = nearest(gate, DTYPE).to(tl.float32)
    up = nearest(up, DTYPE).to(tl.float32)
    shrunk = tl.exp(-tl.abs(gate))
    silu = nearest(gate * tl.where(gate >= 0, 1.0, shrunk) / (1.0 + shrunk), DTYPE)
    return silu.to(tl.float32) * up


@kernel
@no_type_check
def _silu_mul_kernel(out_ptr, gate_up_ptr, count, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_input(PDL)
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < count
    address = gate_up_ptr + offs // size * 2 * size + offs % size
    gate = tl.load(address, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(address + size, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, nearest(gated(gate, up, DTYPE), DTYPE), mask=mask)


def silu_mul(gate_up_RI2: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) · up, [R, I], of [R, 2I] with gate before up."""
    require_contiguous(gate_up_RI2=gate_up_RI2)
    num_rows = gate_up_RI2.shape[0]
    size = gate_up_RI2.shape[1] // 2
    out = gate_up_RI2.new_empty(num_rows, size)
    block = block_of(num_rows * size, 1024)
    _silu_mul_kernel[(ceil_div(out.numel(), block),)](
        out_ptr=out, gate_up_ptr=gate_up_RI2, count=out.numel(), size=size, BLOCK=block
    )
    return out
