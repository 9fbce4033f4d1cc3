"""Side outputs of the target by slot: written with a row's KV, and moved with the accepted path."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.phases import Batch, Verdict
from specsim.core.pool import KVPool
from specsim.core.target import ForwardOutput
from specsim.fast.model.columns import slot_of
from specsim.fast.runtime.launch import await_input, kernel, next_power_of_2, require_contiguous


@kernel
@no_type_check
def _write_kernel(out_ptr, rows_ptr, slots_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    await_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    offs = tl.arange(0, BLOCK)
    values = tl.load(rows_ptr + row * SIZE + offs, mask=offs < SIZE)
    tl.store(out_ptr + slot * SIZE + offs, values, mask=(offs < SIZE) & (slot >= 0))


def write_side(pools: KVPool, slots_R: torch.Tensor, output: ForwardOutput) -> None:
    """Write the side outputs of rows to their slots, without those of slot -1."""
    for name, out in pools.side.rows.items():
        rows = output.side[name]
        require_contiguous(rows=rows)
        size = rows[0].numel() if len(rows) else 1
        _write_kernel[(len(rows),)](
            out_ptr=out, rows_ptr=rows, slots_ptr=slots_R, SIZE=size, BLOCK=next_power_of_2(size), num_warps=1
        )


@kernel
@no_type_check
def _move_kernel(
    out_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    locations_ptr,
    accept_index_ptr,
    width,
    columns,
    SIZE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Move the rows of one request's path to its columns from L on, reading all before writing any."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK_W)
    row = tl.load(rows_ptr + request)
    column = tl.load(lens_ptr + request) + step
    node = tl.load(accept_index_ptr + request * width + step, mask=(step < width) & (row >= 0), other=-1).to(tl.int64)
    source = tl.load(locations_ptr + node, mask=node >= 0, other=-1)
    destination = slot_of(table_ptr, columns, row, column, mask=node >= 0)
    moved = ((source >= 0) & (destination >= 0) & (source != destination))[:, None]
    offs = tl.arange(0, BLOCK)[None, :]
    values = tl.load(out_ptr + source[:, None] * SIZE + offs, mask=moved & (offs < SIZE))
    tl.debug_barrier()
    tl.store(out_ptr + destination[:, None] * SIZE + offs, values, mask=moved & (offs < SIZE))


def move_side(batch: Batch, cache_locations: torch.Tensor, verdict: Verdict, pools: KVPool) -> None:
    """Move the accepted path's side outputs to columns L..L+n, as `commit` moves its KV."""
    width = verdict.accept_index.shape[1]
    for out in pools.side.rows.values():
        size = out[0].numel()
        _move_kernel[(batch.size,)](
            out_ptr=out,
            table_ptr=pools.req_to_token,
            rows_ptr=batch.req_pool_indices,
            lens_ptr=batch.seq_lens,
            locations_ptr=cache_locations,
            accept_index_ptr=verdict.accept_index,
            width=width,
            columns=pools.req_to_token.shape[1],
            SIZE=size,
            BLOCK_W=next_power_of_2(width),
            BLOCK=next_power_of_2(size),
        )
