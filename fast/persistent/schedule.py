"""Schedule of the persistent forward: tiles of each program, the order of its ring, and its counters.

The kernel reads every number here, so what is tested in Python is what runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from specsim.fast.runtime.launch import ceil_div, next_power_of_2

HEAD_DIM = 128
TILE = 16  # outputs of a tile of a product
DEPTH = 1024  # inputs of a stage
STAGE_BYTES = TILE * DEPTH * 2
COLUMNS = 64  # keys, with their values, of a stage
SUMS = 4  # finished tiles that wait for their epilogue
WAKES = 4  # barriers with which a poller wakes the other roles, in turn
STRIDE = 8  # i32 between two counters
MOST_ROWS = 16
FLIGHT = 2  # stages of a program on their way: enough to keep the memory busy, and signals wait behind few
_SPLITS = 32  # most parts of a request's keys


class WeightStage(NamedTuple):
    """One fill of a slot of the ring."""

    product: str  # qkv, keys, o, gate_up or down
    tile: int  # of the product; of keys: the number of the 64 columns
    depth: int  # which DEPTH inputs


@dataclass(frozen=True, slots=True)
class Product:
    """A product of rows with one weight, cut into tiles of 16 outputs."""

    name: str
    tiles: int
    depth: int  # inputs

    @property
    def stages(self) -> int:
        """Fills of the ring for one tile."""
        return ceil_div(self.depth, DEPTH)

    @property
    def bytes(self) -> int:
        """Bytes of the weight in two-byte numbers."""
        return self.tiles * TILE * self.depth * 2


@dataclass(frozen=True, slots=True)
class ForwardSchedule:
    """Work of every program in a forward of `requests` requests with `nodes` rows each.

    Rows are padded to 8 or 16. Programs take tiles in turn: program p has tiles p, p + programs, and so on. Keys of a
    request and a KV head are cut into `splits` parts, one for each of as many programs. With batch_invariant there are
    as many parts as for a single request, and a program attends to its part of one request after the other.
    """

    hidden: int
    inner: int  # between up and down
    heads: int
    kv_heads: int
    layers: int
    requests: int
    nodes: int
    programs: int = 128
    has_head_norms: bool = False
    has_windows: bool = False
    features: tuple[int, ...] = ()  # layers whose inputs are outputs of the forward
    batch_invariant: bool = False
    eps: float = 1e-5

    @property
    def rows(self) -> int:
        """Rows of the forward."""
        return self.requests * self.nodes

    @property
    def width(self) -> int:
        """Rows with their padding; an instruction of a product takes 8."""
        return 8 if self.rows <= 8 else 16

    @property
    def ring(self) -> int:
        """Slots of the ring, as many as shared memory holds next to the sums."""
        return 6 if self.width == 8 else 5

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def pairs(self) -> int:
        """Pairs of a row and a query head of a group, padded to a power of two."""
        return max(8, next_power_of_2(self.nodes * self.group))

    @property
    def units(self) -> int:
        """Pairs of a request and a KV head."""
        return self.requests * self.kv_heads

    @property
    def turns(self) -> int:
        """Units of a program, one after the other."""
        return self.requests if self.batch_invariant else 1

    @property
    def splits(self) -> int:
        """Parts of the keys of a unit, a power of two like every size of a tile."""
        return min(_SPLITS, 1 << (self.programs * self.turns // self.units).bit_length() - 1)

    @property
    def parts(self) -> int:
        """Parts of the keys of all units."""
        return self.units * self.splits

    @property
    def attended(self) -> int:
        """Width of the attention's output."""
        return self.heads * HEAD_DIM

    @property
    def merged(self) -> int:
        """Numbers that one program merges."""
        return max(1, self.pairs * HEAD_DIM // self.splits)

    @property
    def products(self) -> dict[str, Product]:
        """Products of a layer in their order."""
        products = (
            Product("qkv", (self.heads + 2 * self.kv_heads) * HEAD_DIM // TILE, self.hidden),
            Product("o", self.hidden // TILE, self.attended),
            Product("gate_up", 2 * self.inner // TILE, self.hidden),
            Product("down", self.hidden // TILE, self.inner),
        )
        return {product.name: product for product in products}

    @property
    def qkv_tiles(self) -> int:
        return self.products["qkv"].tiles

    @property
    def residual_tiles(self) -> int:
        """Tiles of the products that are added to the residual rows."""
        return self.hidden // TILE

    @property
    def gate_up_tiles(self) -> int:
        return self.products["gate_up"].tiles

    @property
    def query_tiles(self) -> int:
        """Tiles of the queries of one KV head."""
        return self.group * HEAD_DIM // TILE

    @property
    def head_expected(self) -> int:
        """Tiles of the keys and values of one KV head, and parts of its units' keys."""
        return 2 * HEAD_DIM // TILE + self.requests * self.splits

    @property
    def padded_nodes(self) -> int:
        """Rows of a request, padded to a power of two."""
        return next_power_of_2(self.nodes)

    @property
    def inner_cut(self) -> int:
        """First stage of down whose inputs have a dependency of their own; a program begins with the stages before."""
        has_pair = 2 * self.programs <= self.residual_tiles
        return 3 * self.products["down"].stages // 4 if has_pair and not self.is_held("down") else 0

    @property
    def first_inner_tiles(self) -> int:
        """Gate-up tiles of the stages before it."""
        return self.inner_cut * DEPTH * 2 // TILE

    @property
    def is_sparse(self) -> bool:
        """Check whether a role may have no work in some step.

        Its poller then waits until all roles have noticed a dependency, before it uses the same barrier again: a role
        without work delays nobody, so that the poller could otherwise be a whole turn ahead of it.
        """
        fewest = min(product.tiles // self.programs for product in self.products.values())
        return fewest < 2 or self.parts < self.programs * self.turns

    # Places of a layer's counters. The first of all counters is the embedding's.
    @property
    def at_attended(self) -> int:
        return self.kv_heads

    @property
    def at_merged(self) -> int:
        return self.at_attended + self.kv_heads

    @property
    def at_o(self) -> int:
        return self.at_merged + 1

    @property
    def at_inner(self) -> int:
        return self.at_o + 1

    @property
    def at_down(self) -> int:
        return self.at_inner + 2

    @property
    def layer_counters(self) -> int:
        return self.at_down + 1

    @property
    def num_counters(self) -> int:
        """Counters of the whole forward."""
        return 1 + self.layers * self.layer_counters

    def tiles_of(self, tiles: int, program: int) -> range:
        """Tiles of a product that a program computes."""
        return range(program, tiles, self.programs)

    def unit(self, program: int, turn: int = 0) -> tuple[int, int, int]:
        """Request, KV head and part of the keys of a program in its turn. A part past the last is no work."""
        head, rest = program % self.kv_heads, program // self.kv_heads
        if self.batch_invariant:
            return turn, head, rest
        return rest % self.requests, head, rest // self.requests

    def attends(self, program: int) -> bool:
        """Check whether a program has a part of any keys."""
        return self.unit(program)[2] < self.splits

    def num_key_stages(self, length: int, window: int | None = None) -> int:
        """Stages of the keys of one unit, those of the visible columns of the prefix."""
        first = 0 if window is None else max(0, length + 1 - window)
        return ceil_div(length - first, COLUMNS)

    def part(self, stages: int, split: int) -> range:
        """Stages of one part of a unit's keys."""
        return range(split * stages // self.splits, (split + 1) * stages // self.splits)

    def is_held(self, product: str) -> bool:
        """Check whether registers hold all inputs of the rows, so that tiles are computed one by one.

        Otherwise a program computes two tiles together, and loads its inputs once for both.
        """
        return self.products[product].depth <= 4 * DEPTH

    def weight_stages(self, program: int, product: str) -> Iterator[WeightStage]:
        """Fills of the ring for one product, in order."""
        tiles = list(self.tiles_of(self.products[product].tiles, program))
        together = 1 if self.is_held(product) else 2
        for first in range(0, len(tiles), together):
            for depth in range(self.products[product].stages):
                for tile in tiles[first : first + together]:
                    yield WeightStage(product, tile, depth)

    def key_stages(self, program: int, length: int, window: int | None = None, turn: int = 0) -> Iterator[WeightStage]:
        """Fills of the ring for the keys and values of a request of this length."""
        _, _, split = self.unit(program, turn)
        if split < self.splits:
            for tile in self.part(self.num_key_stages(length, window), split):
                yield WeightStage("keys", tile, 0)

    def layer_stages(self, program: int, lengths: tuple[int, ...], window: int | None = None) -> Iterator[WeightStage]:
        """Fills of the ring in one layer, in order."""
        yield from self.weight_stages(program, "qkv")
        for turn in range(self.turns):
            yield from self.key_stages(program, lengths[self.unit(program, turn)[0]], window, turn)
        for product in ("o", "gate_up", "down"):
            yield from self.weight_stages(program, product)

    def dependencies(self, program: int) -> tuple[tuple[int, int], ...]:
        """Counters that a program's poller awaits in one layer: (counter, expected count).

        They are counted from the layer's first counter; -1 is the last one of the layer before.
        """
        head = program % self.kv_heads
        return (
            (-1, self.residual_tiles),
            (head, self.query_tiles),
            (self.at_attended + head, self.head_expected),
            (self.at_merged, self.parts),
            (self.at_o, self.residual_tiles),
            (self.at_inner, self.first_inner_tiles),
            (self.at_inner + 1, self.gate_up_tiles - self.first_inner_tiles),
        )

    def signal(self, product: str, tile: int) -> int:
        """Counter of its layer that a finished tile of a product raises."""
        if product == "qkv":
            head = tile // (HEAD_DIM // TILE)
            if head < self.heads:
                return head // self.group
            return self.at_attended + (head - self.heads) % self.kv_heads
        late = tile >= self.first_inner_tiles
        return {"o": self.at_o, "gate_up": self.at_inner + late, "down": self.at_down}[product]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that the ring streams in one forward."""
        return self.layers * sum(product.bytes for product in self.products.values())
