"""Comparison of two ranks of the fast implementation with the reference, and of the ranks with each other."""

from functools import partial
from typing import Any

from specsim.core.rank_group import RankGroup
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.grid_run import check as check_cell
from specsim.correctness.differential.implementation import Shares
from specsim.correctness.differential.result import Divergence
from specsim.correctness.faults.checks.cells import cell
from specsim.correctness.faults.fault import FaultFinding
from specsim.correctness.ranks import run_in_ranks

SIZE = 2


def check(setting: dict[str, Any], device: str) -> list[FaultFinding]:
    """Compare a cell in lockstep on two ranks; setting: see checks.cells, and draft_parallel.

    Ranks that differ are reported as `rank digests`.
    """
    shares = Shares(SIZE, setting.pop("draft_parallel", "sharded"))
    first = next(filter(None, run_in_ranks(partial(_compare, cell(setting), shares, device), SIZE)), None)
    if first is None:
        return []
    location = f"round {first.round}, {first.phase}"
    location += "" if first.request is None else f", request {first.request}"
    return [FaultFinding(first.field, location, first.reference, first.fast)]


def _compare(case: Cell, shares: Shares, device: str, _: RankGroup) -> Divergence | None:
    return check_cell(case, device=device, shares=shares).first_divergence
