"""Products of many rows on Hopper GPUs, with the steps after them, in one launch of specsim.fast.model.wide_kernel.

The kernels of specsim.fast.model.linear serve everywhere else.
"""

import functools
from typing import NamedTuple, Self

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specsim.fast.model.metadata import KVTensors
from specsim.fast.model.wide_finish import GATED, HEADED, PLAIN, Shape
from specsim.fast.model.wide_kernel import wide
from specsim.fast.model.wide_plan import BLOCK_K, BLOCK_N, MOST_WIDE_ROWS, WidePlan
from specsim.fast.runtime.gluon import Constants
from specsim.fast.runtime.launch import ceil_div, next_power_of_2

_STAGE_BYTES = 226_000  # of tiles in shared memory
MOST_BLOCKS = 4  # of rows, in one launch


class Heads(NamedTuple):
    """Memory to which a projection to queries, keys and values writes its heads."""

    query_ptr: torch.Tensor  # [R, A, D]
    kv_ptrs: KVTensors
    turns_ptr: torch.Tensor  # [R, 2, D/2], rotations
    slots_ptr: torch.Tensor  # i64 [R]

    def of(self, rows: slice) -> Self:
        """Return the heads of some rows."""
        names = ("query_ptr", "turns_ptr", "slots_ptr")
        return self._replace(**{name: getattr(self, name)[rows] for name in names})


class Finish(NamedTuple):
    """Operands and results of the steps after a product, None where there is no such step."""

    rows: torch.Tensor | None = None  # [R, N], results
    weighted: torch.Tensor | None = None  # [R, N], results times the next norm's weight
    squares: torch.Tensor | None = None  # f32 [R, tiles], parts of the results' squares
    base: torch.Tensor | None = None  # [R, N], added
    bias: torch.Tensor | None = None  # [N]
    next_norm: torch.Tensor | None = None  # [N]
    heads: Heads | None = None

    def of(self, rows: slice) -> Self:
        """Return the operands and results of some rows."""
        names = ("rows", "weighted", "squares", "base")
        own = {name: each[rows] for name in names if (each := getattr(self, name)) is not None}
        return self._replace(heads=None if self.heads is None else self.heads.of(rows), **own)


@functools.cache
def _counters(device: torch.device, plan: WidePlan, row_blocks: int) -> torch.Tensor:
    """Allocate counters of tiles' parts, of a plan whose products follow each other."""
    return torch.zeros(row_blocks * plan.num_tiles, dtype=torch.int64, device=device)


def _layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(128, 16, rank=rank)


def _weight_descriptor(weight: torch.Tensor, kind: int, head_dim: int) -> TensorDescriptor:
    """Describe the weight's tiles to the copy engine, with pairs eight rows apart."""
    size, inner = weight.shape
    if kind == PLAIN.value:
        return TensorDescriptor(weight, [size, inner], [inner, 1], [BLOCK_N, BLOCK_K], _layout(2))
    if kind == GATED.value:
        shape = [size // 16, 2, 8, inner]
        strides = [8 * inner, size // 2 * inner, inner, 1]
        return TensorDescriptor(weight, shape, strides, [BLOCK_N // 16, 2, 8, BLOCK_K], _layout(4))
    shape = [size // head_dim, head_dim // 16, 2, 8, inner]
    strides = [head_dim * inner, 8 * inner, head_dim // 2 * inner, inner, 1]
    block = [BLOCK_N // head_dim, head_dim // 16, 2, 8, BLOCK_K]
    return TensorDescriptor(weight, shape, strides, block, _layout(5))


def multiply_wide(
    plan: WidePlan,
    x: torch.Tensor,
    squares: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    finish: Finish,
    is_gated: bool = False,
) -> None:
    """Compute x Wᵀ and the steps of `finish` in one launch, up to MOST_BLOCKS blocks of rows at a time."""
    num_rows = len(x)
    if x.data_ptr() % 16 or x.stride(0) % 8:  # the copy engine reads 16 bytes at a time
        x = x.clone(memory_format=torch.contiguous_format)
    block = min(MOST_WIDE_ROWS, max(16, next_power_of_2(num_rows)))
    row_blocks = ceil_div(num_rows, block)
    if row_blocks > MOST_BLOCKS:
        most = MOST_BLOCKS * block
        for low in range(0, num_rows, most):
            some = slice(low, low + most)
            part = None if squares is None else squares[some]
            multiply_wide(plan, x[some], part, eps, weight, finish.of(some), is_gated)
        return
    size, inner = weight.shape
    heads = finish.heads
    kv_heads, head_dim = (0, 16) if heads is None else heads.kv_ptrs.keys_ptr.shape[1:]
    shape = Shape(
        size=size,
        inner=inner,
        stride_out=0 if finish.rows is None else finish.rows.stride(0),
        stride_base=0 if finish.base is None else finish.base.stride(0),
        share=plan.share,
        tiles=plan.num_tiles,
        blocks=plan.blocks,
        most_parts=plan.most_parts,
        finishers=plan.finishers,
        squares=0 if squares is None else squares.shape[1],
        kind=(GATED if is_gated else PLAIN if heads is None else HEADED).value,
        heads=0 if heads is None else heads.query_ptr.shape[1],
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=eps,
        precedes_wide=is_gated or finish.base is not None,
    )
    num_parts = row_blocks * plan.programs if plan.most_parts > 1 else 0
    wide[plan.programs, row_blocks](
        weight=_weight_descriptor(weight, shape.kind, head_dim),
        x=TensorDescriptor(x, [num_rows, inner], [x.stride(0), 1], [block, BLOCK_K], _layout(2)),
        finish_ptrs=finish,
        squares_ptr=squares,
        parts_ptr=x.new_empty(num_parts * BLOCK_N * block, dtype=torch.float32),
        counts_ptr=_counters(x.device, plan, row_blocks),
        num_rows=num_rows,
        S=Constants(shape),
        R=block,
        STAGES=min(12, _STAGE_BYTES // (2 * BLOCK_K * (BLOCK_N + block))),
        num_warps=8,
        maxnreg=168,
    )
