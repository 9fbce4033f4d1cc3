"""Cells of the differential from settings, and checks of them: against the oracle, and on two ranks."""

from dataclasses import replace
from functools import partial
from typing import Any

from specsim.core.rank_group import RankGroup
from specsim.correctness.differential import Cell
from specsim.correctness.differential import check as check_cell
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.implementation import Shares
from specsim.correctness.differential.oracle import compare_with_oracle
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.differential.result import Divergence
from specsim.correctness.faults.fault import FaultFinding
from specsim.correctness.ranks import run_in_ranks

NUM_RANKS = 2
OWN = ("rounds", "stop_token_ids", "max_new_tokens", "temperature", "verifier")


def cell(setting: dict[str, Any]) -> Cell:
    """Make the cell of a setting.

    The setting has axes of the grids, rounds, the verifier (with the width that it needs), and of every request
    stop_token_ids, max_new_tokens and temperature.
    """
    axes = {name: value for name, value in setting.items() if name not in OWN}
    case = cell_of(axes)
    sampling = case.sampling
    for name in ("stop_token_ids", "max_new_tokens", "temperature"):
        if name in setting:
            value = tuple(setting[name]) if name == "stop_token_ids" else setting[name]
            sampling = tuple(replace(params, **{name: value}) for params in sampling)
    config = case.config
    if verifier := setting.get("verifier"):
        width = 1 + config.topk * config.num_steps
        config = replace(config, verifier=verifier, num_draft_tokens=width)
    return replace(case, sampling=sampling, config=config, rounds=setting.get("rounds", 2))


def compare_oracle(setting: dict[str, Any], _device: str) -> list[FaultFinding]:
    """Compare the reference with the oracle: tokens, finish reasons, counters and logprobs of every request.

    It detects faults that both implementations share. setting: see `cell`.
    """
    case = cell(setting)
    return [
        FaultFinding(wrong.field, f"{wrong.phase}, request {wrong.request}", wrong.reference, wrong.fast)
        for wrong in compare_with_oracle(case, make_pair(case.pair))
    ]


def compare_ranks(setting: dict[str, Any], device: str) -> list[FaultFinding]:
    """Compare a cell in lockstep on two ranks; setting: see `cell`, and draft_parallel.

    Ranks that differ are reported as `rank digests`.
    """
    shares = Shares(NUM_RANKS, setting.pop("draft_parallel", "sharded"))
    first = next(filter(None, run_in_ranks(partial(_compare, cell(setting), shares, device), NUM_RANKS)), None)
    if first is None:
        return []
    return [FaultFinding(first.field, first.location, first.reference, first.fast)]


def _compare(case: Cell, shares: Shares, device: str, _: RankGroup) -> Divergence | None:
    return check_cell(case, device=device, shares=shares).first_divergence
