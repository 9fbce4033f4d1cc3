"""Policies that choose the number of drafts in every round, compared on the same requests."""

from collections.abc import Sequence

from specsim.core.arguments import check_arguments
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require
from specsim.core.policies.by_batch_size import OffSwitch
from specsim.core.policies.goodput import Goodput
from specsim.core.policies.moving_average import MovingAverage
from specsim.core.policies.policy import Always, Policy
from specsim.core.policies.throughput import Throughput
from specsim.simulator.acceptance import Cost, Option
from specsim.simulator.candidates import candidates
from specsim.simulator.cell import Cell
from specsim.simulator.results import SimulatedRun
from specsim.simulator.runner import Prefill
from specsim.simulator.server import simulate
from specsim.simulator.workload import SimulatedWorkload


def policies(cost: Cost, options: Sequence[Option], limit: int) -> dict[str, Policy]:
    """Make policies by name: every option by itself, and one of each kind that chooses among all.

    limit: of the off-switch, between plain decoding and the longest chain.
    """
    configs = [option.config for option in options]
    lengths = [config.num_steps for config in configs]
    require(0 in lengths, "options", f"{len(options)} chains", "chains and plain decoding (Option.plain)")
    if any(config.topk != 1 for config in configs):
        raise InputError("options", "a tree", "chains: the acceptance of one tree does not give that of another")
    static: dict[str, Policy] = {_name(steps): Always(option) for option, steps in enumerate(lengths)}
    return static | {
        f"off above {limit}": OffSwitch(limit, lengths.index(max(lengths)), lengths.index(0)),
        "moving average": MovingAverage(configs),
        "throughput": Throughput(configs),
        "goodput": Goodput(cost, configs),
    }


@check_arguments
def compare_policies(
    cost: Cost,
    options: Sequence[Option],
    workload: SimulatedWorkload,
    serving: ServingConfig | None = None,
    *,
    limit: int = 32,
    prefill: Prefill = "mixed",
    seed: int = 0,
) -> dict[str, SimulatedRun]:
    """Run every policy on the same trace."""
    return {
        name: simulate(cost, options, workload, serving, prefill=prefill, policy=policy, seed=seed)
        for name, policy in policies(cost, options, limit).items()
    }


def _name(steps: int) -> str:
    return f"{steps} draft{'s' if steps > 1 else ''}" if steps else "no drafts"


def policy_metrics(cell: Cell, limit: int) -> dict[str, dict[str, float]]:
    """Compute the metrics of every policy over plain decoding and all chains, on equal traces.

    limit: batch size of the off-switch.
    """
    allowed = f"{cell.schedule}, the schedule, with policies: their server turns drafting on and off"
    require(cell.plain_schedule in (None, cell.schedule), "plain_schedule", cell.plain_schedule, allowed)
    options = [cell.option(config) for config in candidates(cell) if config.topk == 1]
    longest = options[-1]
    scenario = cell.serving(longest)
    runs = compare_policies(
        scenario.cost(longest),
        options,
        scenario.arriving,
        scenario.serving(longest),
        limit=limit,
        prefill=scenario.prefill,
        seed=scenario.seed,
    )
    return {name: run.metrics() for name, run in runs.items()}
