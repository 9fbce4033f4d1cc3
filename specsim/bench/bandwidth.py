"""A kernel that only reads memory, to measure the read bandwidth of a device."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl


class Tiling(NamedTuple):
    """Work of one program."""

    tile: int  # numbers
    tiles: int
    warps: int


TILINGS = (Tiling(1024, 8, 4), Tiling(2048, 4, 8), Tiling(4096, 4, 8), Tiling(4096, 8, 16))


@triton.jit
def _sum_kernel(out_ptr, numbers_ptr, TILE: tl.constexpr, TILES_OF_PROGRAM: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE * TILES_OF_PROGRAM
    total = tl.zeros([TILE], tl.int32)
    for tile in tl.static_range(TILES_OF_PROGRAM):
        total += tl.load(numbers_ptr + start + tile * TILE + tl.arange(0, TILE))
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def partial_sums(numbers: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """Sum tile · tiles i32 numbers per program, modulo 2³²; they have to divide the tensor."""
    programs = numbers.numel() // (tiling.tile * tiling.tiles)
    out = torch.empty(programs, dtype=torch.int32, device=numbers.device)
    options: dict[str, Any] = {"TILE": tiling.tile, "TILES_OF_PROGRAM": tiling.tiles, "num_warps": tiling.warps}
    _sum_kernel[(programs,)](out_ptr=out, numbers_ptr=numbers, **options)
    return out
