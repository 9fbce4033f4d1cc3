"""Settings compared by several runs each, on the same requests for all settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specsim.core.config import SpecConfig
from specsim.simulator.acceptance import Option
from specsim.simulator.cell import Cell
from specsim.simulator.results import SimulatedRun

REPLICATES = 8
EQUAL = 0.01  # smallest significant regret: no cost model is exact to 1 %
CHANCE = 0.03  # largest regret that may be chance, however large the spread
CONFIDENCE = 0.95

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Replicated:
    """Runs of one setting, compared with those of the best."""

    option: Option
    metrics: dict[str, float]  # means over the runs
    regret: float  # relative loss against the setting of least mean cost
    spread: float | None  # half the width of its confidence interval; None with a single run

    @property
    def is_equal(self) -> bool:
        """Whether the loss may be chance, or is too small to count."""
        return self.regret <= max(min(self.spread or 0.0, CHANCE), EQUAL)


def run_replicates(
    cell: Cell,
    options: Sequence[Option],
    count: int,
    cost: Callable[[Metrics], float],
    done: Callable[[], object] = lambda: None,
    measure: Callable[[SimulatedRun], dict[str, float]] = SimulatedRun.metrics,
) -> list[Replicated]:
    """Run every option `count` times; run i has the same arrivals, lengths and uniforms for all options.

    cost: figure of a run to compare by, less is better. done: called after every run. measure: the figures of a run.
    """
    runs: list[list[Metrics]] = [[] for _ in options]
    for seed in seeds(cell.seed, count):
        for scenario, metrics in zip(cell.with_values(seed=seed).scenarios(options), runs, strict=True):
            metrics.append(measure(scenario.run(scenario.option)))
            done()
    costs = np.array([[cost(run) for run in metrics] for metrics in runs])
    best = costs[costs.mean(axis=1).argmin()]
    return [
        Replicated(option, _means(metrics), float(option_costs.mean() / best.mean() - 1), _spread(option_costs, best))
        for option, metrics, option_costs in zip(options, runs, costs, strict=True)
    ]


def seeds(seed: int, count: int) -> list[int]:
    """Make the seeds of a seed's replicates: no two seeds share one."""
    return [(seed * count + replicate) % 2**64 for replicate in range(count)]


def cheapness(config: SpecConfig) -> tuple[int, int, int]:
    """Order equally good settings: fewer draft tokens first, then fewer steps, then narrower ones."""
    return config.num_draft_tokens, config.num_steps, config.topk


def _means(runs: Sequence[Metrics]) -> dict[str, float]:
    return {name: float(np.mean([run[name] for run in runs])) for name in runs[0]}


def _spread(costs: np.ndarray, best: np.ndarray) -> float | None:
    """Compute half the width of the confidence interval of the regret.

    It is that of the mean of paired differences, relative to the mean of the best.
    """
    count = len(costs)
    if count == 1:
        return None
    deviation = np.std(costs - best, ddof=1) / best.mean()
    from scipy.special import stdtrit  # slow to load

    return float(stdtrit(count - 1, (1 + CONFIDENCE) / 2) * deviation / np.sqrt(count))
