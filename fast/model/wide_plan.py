"""Plan of a wide product: each program streams an equal share of the weight, whatever tiles it belongs to.

The weight is cut into tiles of outputs and each tile into blocks of the inner dimension. Programs take equal numbers of
consecutive blocks, tile after tile. A tile whose blocks several programs share is added up from their parts, always in
the same order. Nothing depends on the number of rows.
"""

import functools
from typing import NamedTuple

from specsim.fast.runtime.launch import ceil_div

BLOCK_N = 128  # outputs of a tile
BLOCK_K = 64  # inner dimension of a block
MOST_PROGRAMS = 132  # one a multiprocessor of an H100 or H200; a constant, so that bits are the same anywhere
MOST_WIDE_ROWS = 128  # of one block of rows
_SLACK = 1.34  # longer shares that are allowed so that they end where tiles do: fewer programs read memory as fast


class WidePlan(NamedTuple):
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
def plan_wide(size: int, inner: int) -> WidePlan:
    """Plan the product with a weight [size, inner]."""
    num_tiles = ceil_div(size, BLOCK_N)
    blocks = ceil_div(inner, BLOCK_K)
    least = ceil_div(num_tiles * blocks, MOST_PROGRAMS)
    aligned = (share for share in range(least, int(least * _SLACK) + 1) if blocks % share == 0 or share % blocks == 0)
    share = next(aligned, least)
    plan = WidePlan(BLOCK_N, num_tiles, blocks, share, ceil_div(num_tiles * blocks, share), 0)
    return plan._replace(most_parts=max(len(plan.parts_of(tile)) for tile in range(num_tiles)))
