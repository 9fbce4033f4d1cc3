"""Policies of core.policies on a simulated server, and their comparison on equal traces.

Arrivals are the same for all policies. Uniforms are named by request and position, so a longer chain sees the same
draws as a shorter one. Options are chains, plain decoding among them.
"""

from collections.abc import Sequence

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require
from specsim.core.policies.by_batch_size import OffSwitch
from specsim.core.policies.goodput import Goodput
from specsim.core.policies.moving_average import MovingAverage
from specsim.core.policies.policy import Always, Policy
from specsim.core.policies.throughput import Throughput
from specsim.simulator.option import Cost, Option
from specsim.simulator.results import Run
from specsim.simulator.timeline import Prefill, simulate
from specsim.simulator.workload import Workload


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


def compare(
    cost: Cost,
    options: Sequence[Option],
    workload: Workload,
    serving: ServingConfig | None = None,
    *,
    limit: int = 32,
    prefill: Prefill = "mixed",
    seed: int = 0,
) -> dict[str, Run]:
    """Run every policy on the same trace."""
    return {
        name: simulate(cost, options, workload, serving, prefill=prefill, policy=policy, seed=seed)
        for name, policy in policies(cost, options, limit).items()
    }


def _name(steps: int) -> str:
    return f"{steps} draft{'s' if steps > 1 else ''}" if steps else "no drafts"
