"""The implementations of a cell: the reference, the reference in float64, and the one under test."""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from specsim.core.columns import two_rounds
from specsim.core.engine_options import EngineOptions
from specsim.core.pair import Pair
from specsim.core.phases import Batch
from specsim.core.pool import KVBuffer, KVPool
from specsim.core.rank_group import RankGroup
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.comparison import Trio
from specsim.serving.generation import load_engine

_HANDED_ON = {"prefill": "draft_input", "verify": "draft_extend_input", "round": "draft_input"}


@dataclass(slots=True)
class Implementation:
    """One engine with its pools, and the state that its next phase starts from."""

    engine: Any
    pools: KVPool
    dtype: torch.dtype
    device: torch.device | str = "cpu"
    pads: bool = False  # whether it pads batches
    ranks: RankGroup | None = None  # this process is one of them, with its slice of the model
    state: Any = None

    def take_over(self, other: "Implementation") -> None:
        """Copy another implementation's state and everything its pools hold."""
        self.pools.copy_(other.pools)
        self.state = deepcopy(other.state).to(self.device, self.dtype)

    def advance(self, phase: str, batch: Batch) -> Any:
        """Run a phase (or a whole `round`) and keep its result as the next phase's state."""
        if self.pools.draft is not None and self.pools.draft.snapshot is not None:
            empty(self.pools.draft.snapshot)
        output = getattr(self.engine, phase)(batch.to(self.device), self.state, self.pools)
        self.state = getattr(output, _HANDED_ON[phase]) if phase in _HANDED_ON else output
        return output


def empty(kv: KVBuffer) -> None:
    """Fill a buffer with NaN, so that unwritten slots show."""
    kv.keys.fill_(torch.nan)
    kv.values.fill_(torch.nan)


class Shares(NamedTuple):
    """Ranks that share the model of the implementation under test, and its forward."""

    tensor_parallel: int = 1
    draft_parallel: Literal["sharded", "replicated"] = "sharded"
    forward: Literal["auto", "kernels", "persistent"] = "auto"


ALONE = Shares()


def load_implementations(
    cell: Cell,
    pair: Pair,
    impl: str = "fast",
    dtype: str = "float32",
    device: str | None = None,
    shares: Shares = ALONE,
) -> Trio[Implementation]:
    """Load the three engines of a cell with their pools."""
    precision = getattr(torch, dtype)
    options = replace(EngineOptions(), impl=impl, dtype=precision, device=device)
    if impl == "fast":
        options = replace(options, graph=cell.graph, bucket=cell.bucket, **shares._asdict())
        options = replace(options, compare_ranks=shares.tensor_parallel > 1)
    under_test = load_implementation(cell, pair, options)
    reference = load_implementation(cell, pair, EngineOptions(dtype=precision))
    return Trio(reference, load_implementation(cell, pair, EngineOptions(dtype=torch.float64)), under_test)


def load_implementation(cell: Cell, pair: Pair, options: EngineOptions) -> Implementation:
    """Load one engine of a cell with its pools.

    A whole round overwrites the draft lanes before it ends, so a snapshot of their KV is kept.
    """
    longest = max(len(p) + s.max_new_tokens for p, s in zip(cell.prompts, cell.sampling, strict=True))
    engine = load_engine(pair, cell.config, cell.options(options), grammars=cell.grammars, verifier=cell.rule)
    columns = two_rounds(longest, engine.config, engine.drafter.num_mask_rows)
    pools = engine.make_pools(len(cell.prompts), len(cell.prompts) * columns)
    if cell.graph == "round" and pools.draft is not None:
        pools.draft.keep_snapshot()
    ranks = RankGroup.joined(options.tensor_parallel)
    return Implementation(engine, pools, options.dtype, engine.device.type, options.impl == "fast", ranks)
