"""Plan of a product: tiles or shares in which a kernel streams the weight, or a library call.

A product of many rows gives each program an equal share of the weight, whatever tiles it belongs to: the weight is cut
into tiles of outputs and each tile into blocks of the inner dimension, and programs take equal numbers of consecutive
blocks, tile after tile. A tile whose blocks several programs share is added up from their parts, always in the same
order. Nothing depends on the number of rows.
"""

import functools
from typing import NamedTuple

import torch

from specsim.fast.runtime.launch import INTERPRETED, ceil_div, has_warp_roles

BLOCK_N = 128  # outputs of a tile
BLOCK_K = 64  # inner dimension of a block
MOST_BLOCK_ROWS = 128  # of one block of rows
_SLACK = 1.34  # longer shares that are allowed so that they end where tiles do: fewer programs read memory as fast
MOST_ROWS = 64  # of a block of rows, and of a product that is streamed where a library's may serve
PROGRAMS = 132  # one a multiprocessor of an H100 or H200; a constant, so that bits and choices are the same anywhere
LEAST_NUMBERS = 2**20  # of a weight that is streamed where a library's product may serve


class ManyRowsPlan(NamedTuple):
    """Shares of the programs of one product."""

    block_n: int  # outputs of a tile
    num_tiles: int
    blocks: int  # of a tile
    share: int  # blocks of a program, consecutive ones
    programs: int
    most_parts: int  # parts of a tile

    @property
    def finishers(self) -> int:
        """Count the programs that finish a tile together, each some of its rows.

        They do where each program has one part of one tile, as parts of a tile end at about the same time. Elsewhere it
        is 1: the program that begins a tile finishes it.
        """
        parts, rest = divmod(self.blocks, self.share)
        return 1 if rest or parts not in (2, 4, 8) else parts

    def fits_heads(self, head_dim: int) -> bool:
        """Check whether tiles end where heads do, so that a projection to heads can rotate them."""
        return head_dim % 16 == 0 and self.block_n % head_dim == 0

    def blocks_of(self, program: int) -> range:
        """List the blocks of a program, counted over all tiles."""
        return range(program * self.share, min((program + 1) * self.share, self.num_tiles * self.blocks))

    def parts_of(self, tile: int) -> range:
        """List the programs that share a tile, in the order in which their parts are added."""
        return range(tile * self.blocks // self.share, ((tile + 1) * self.blocks - 1) // self.share + 1)


@functools.cache
def plan_many_rows(size: int, inner: int) -> ManyRowsPlan:
    """Plan the product with a weight [size, inner]."""
    num_tiles = ceil_div(size, BLOCK_N)
    blocks = ceil_div(inner, BLOCK_K)
    least = ceil_div(num_tiles * blocks, PROGRAMS)
    aligned = (share for share in range(least, int(least * _SLACK) + 1) if blocks % share == 0 or share % blocks == 0)
    share = next(aligned, least)
    plan = ManyRowsPlan(BLOCK_N, num_tiles, blocks, share, ceil_div(num_tiles * blocks, share), 0)
    return plan._replace(most_parts=max(len(plan.parts_of(tile)) for tile in range(num_tiles)))


class ProductTiling(NamedTuple):
    """Tiles of a streamed product."""

    block_m: int  # rows
    block_n: int  # outputs
    block_k: int  # inner dimension
    stages: int  # tiles that are loaded at a time

    def fits_heads(self, head_dim: int) -> bool:
        """Check whether tiles end where heads do, so that a projection to heads can rotate them."""
        return head_dim % self.block_n == 0


@functools.cache
def choose(
    num_rows: int, size: int, inner: int, dtype: torch.dtype, batch_invariant: bool, is_gated: bool = False
) -> ProductTiling | ManyRowsPlan | None:
    """Choose the tiles for the product of rows with a weight [size, inner], or None for a library.

    is_gated: two outputs become one. batch_invariant: the plan is always that of 64 rows or of many, and no library is
    used, so that a row's result does not depend on the number of rows. The numbers were the fastest on an H200.
    """
    is_large = dtype == torch.bfloat16 and size * inner >= LEAST_NUMBERS
    is_many = batch_invariant or 16 < num_rows <= MOST_BLOCK_ROWS
    if is_large and is_many and inner % 8 == 0 and size % 16 == 0 and has_warp_roles():
        return plan_many_rows(size, inner)
    streams = not INTERPRETED and is_large and num_rows <= MOST_ROWS
    is_narrow = num_rows <= 16 and not batch_invariant
    few = size <= PROGRAMS * 32
    if not batch_invariant and not (streams and (is_narrow or is_gated or size < 2**14)):
        return None
    if is_gated:
        tiles = (32, 256, 3) if is_narrow else (64, 64, 4)
    elif is_narrow:
        tiles = (32, 512, 4) if few else (32, 256, 4)
    else:
        tiles = (32, 256, 4) if few else (32, 128, 4)
    block_n, block_k, stages = tiles
    return ProductTiling(16 if is_narrow else MOST_ROWS, block_n, block_k * 2 // dtype.itemsize, stages)
