"""Masks of verify trees for attention, in the layouts FULL and QLEN_BITPACKED."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.fast.runtime.launch import block_of, ceil_div, kernel, require_contiguous

_ROWS = 32
_PREFIX = 256


@kernel
@no_type_check
def _full_mask_kernel(mask_ptr, seq_lens_ptr, out_ptr, batch_size, num_nodes, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    start = request * num_nodes * num_nodes
    for first in range(0, batch_size, BLOCK):
        before = first + tl.arange(0, BLOCK)
        start += num_nodes * tl.sum(tl.load(seq_lens_ptr + before, mask=before < request, other=0))
    prefix = tl.load(seq_lens_ptr + request)
    for first in range(0, prefix + num_nodes, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        mask = (node < num_nodes) & (column < prefix + num_nodes)
        tree_column = (request * num_nodes + node) * num_nodes + column - prefix
        sees = tl.load(mask_ptr + tree_column, mask=mask & (column >= prefix), other=1)
        tl.store(out_ptr + start + node * (prefix + num_nodes) + column, sees, mask=mask)


def full_mask(mask_BNN: torch.Tensor, seq_lens: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Make the mask in layout FULL, flat bool.

    Each request has N rows of L + N columns; the prefix columns are true. The size depends on seq_lens, which the host
    reads where `out` is not given, so not in a graph.
    """
    require_contiguous(mask_BNN=mask_BNN, seq_lens=seq_lens)
    batch_size, num_nodes = mask_BNN.shape[:2]
    if out is None:
        size = num_nodes * (int(seq_lens.sum()) + batch_size * num_nodes)
        out = torch.empty(size, dtype=torch.bool, device=mask_BNN.device)
    rows = block_of(num_nodes, 8, _PREFIX)
    _full_mask_kernel[(batch_size, ceil_div(num_nodes, rows))](
        mask_ptr=mask_BNN,
        seq_lens_ptr=seq_lens,
        out_ptr=out,
        batch_size=batch_size,
        num_nodes=num_nodes,
        ROWS=rows,
        BLOCK=_PREFIX,
    )
    return out


@kernel
@no_type_check
def _bitpacked_mask_kernel(mask_ptr, out_ptr, num_rows, num_nodes, ROWS: tl.constexpr, BITS: tl.constexpr):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    word = tl.program_id(1)
    bit = tl.arange(0, BITS)[None, :].to(tl.int64)
    column = word * BITS + bit
    mask = (rows < num_rows) & (column < num_nodes)
    sees = tl.load(mask_ptr + rows * num_nodes + column, mask=mask, other=0)
    packed = tl.sum(sees.to(tl.int64) << bit, axis=1, keep_dims=True)
    tl.store(out_ptr + rows * tl.num_programs(1) + word, packed.to(out_ptr.dtype.element_ty), mask=rows < num_rows)


def bitpacked_mask(mask_BNN: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Make the mask in layout QLEN_BITPACKED: bit c of a row's word is column c.

    uint8 [B, N] for N ≤ 8, int16 for N ≤ 16, int32 for N ≤ 32, and int32 [B, N, ceil(N/32)] beyond. Bit patterns are
    stored in signed words.
    """
    require_contiguous(mask_BNN=mask_BNN)
    batch_size, num_nodes = mask_BNN.shape[:2]
    bits = next((bits for bits in (8, 16, 32) if num_nodes <= bits), 32)
    words = ceil_div(num_nodes, bits)
    num_rows = batch_size * num_nodes
    if out is None:
        shape = (batch_size, num_nodes) if words == 1 else (batch_size, num_nodes, words)
        dtype = {8: torch.uint8, 16: torch.int16, 32: torch.int32}[bits]
        out = torch.empty(shape, dtype=dtype, device=mask_BNN.device)
    rows = block_of(num_rows, _ROWS, bits)
    _bitpacked_mask_kernel[(ceil_div(num_rows, rows), words)](
        mask_ptr=mask_BNN, out_ptr=out, num_rows=num_rows, num_nodes=num_nodes, ROWS=rows, BITS=bits
    )
    return out
