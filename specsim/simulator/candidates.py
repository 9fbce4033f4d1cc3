"""Settings that a plan tries, their comparison by several runs each, and their options of engines' servers."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import require
from specsim.core.kinds import KINDS, SERVED
from specsim.simulator.acceptance import Option
from specsim.simulator.cell import Cell
from specsim.simulator.model import read_config
from specsim.simulator.results import SimulatedRun

TREES = ((2, 2), (2, 3), (2, 5), (3, 4), (4, 3), (4, 5), (8, 3), (8, 5))  # topk and num_steps
# Drafters over whose drafts no released engine builds trees.
CHAINS_ONLY = tuple(name for name, kind in KINDS.items() if kind.is_parallel)
SIZES = (4, 8, 16, 32, 64)  # num_draft_tokens


def candidates(cell: Cell) -> list[SpecConfig]:
    """List plain decoding, every chain, and trees, no wider and no deeper than the shares."""
    depth = len(cell.shares)
    width = min(map(len, cell.shares)) if takes_trees(cell) else 1
    page = cell.page_size
    chains = [SpecConfig(1, steps, steps + 1, page) for steps in range(1, depth + 1)]
    trees = [
        SpecConfig(topk, steps, size, page)
        for topk, steps in TREES
        for size in SIZES
        if topk <= width and steps <= depth and steps + 1 < size <= topk + (steps - 1) * topk**2 + 1
    ]
    return [SpecConfig.plain(page), *chains, *trees]


def takes_trees(cell: Cell) -> bool:
    """Whether an engine takes trees."""
    return not why_no_trees(cell)


def why_no_trees(cell: Cell) -> str:
    """Say why no engine takes trees; empty where one does."""
    if cell.drafter in CHAINS_ONLY:
        return "no released engine builds them over parallel drafts"
    if cell.page_size > 1 and has_latent_attention(cell):
        return "engines take them for latent attention with --page-size 1 only"
    return ""


def has_latent_attention(cell: Cell) -> bool:
    """Whether the model's attention reads one latent vector per token (MLA)."""
    config = read_config(cell.model)[1]
    return bool(config.get("text_config", config).get("kv_lora_rank"))


def limits_reached(config: SpecConfig, tried: Sequence[SpecConfig]) -> dict[str, int]:
    """Find the fields of a setting, with values, that no tried setting of its kind exceeds: more might be better.

    Chains are compared with chains, and trees with trees.
    """
    if config.is_plain:
        return {}
    same = [setting for setting in tried if (setting.topk == 1) == (config.topk == 1)]
    names = ("num_steps",) if config.topk == 1 else ("topk", "num_steps", "num_draft_tokens")
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value == max(getattr(setting, name) for setting in same)}


_SGLANG_SIZES = {"num_steps": "num-steps", "topk": "eagle-topk", "num_draft_tokens": "num-draft-tokens"}


def sglang_flags(cell: Cell, config: SpecConfig, draft: str = "DRAFT_MODEL") -> str | None:
    """Make the options of `python -m sglang.launch_server`.

    With drafts SGLang runs 48 requests at most by default. None: SGLang has no such drafter.
    """
    flags = [f"--tp-size {cell.tensor_parallel}", f"--page-size {config.page_size}"]
    if not config.is_plain:
        if SERVED[cell.drafter].sglang is None:
            return None
        flags = [*_sglang_drafts(cell, config, draft), *flags, f"--max-running-requests {cell.max_running}"]
    if config.topk > 1:
        flags.append(f"--attention-backend {_tree_backend(cell)}")
    return " ".join(flags)


def _sglang_drafts(cell: Cell, config: SpecConfig, draft: str) -> list[str]:
    served = SERVED[cell.drafter]
    head = "" if KINDS[cell.drafter].in_target else f" --speculative-draft-model-path {shlex.quote(draft)}"
    if "topk" not in served.sglang_sizes:
        require(config.topk == 1, "topk", config.topk, f"1: SGLang drafts chains with {cell.drafter}")
    sizes = [f"--speculative-{_SGLANG_SIZES[name]} {getattr(config, name)}" for name in served.sglang_sizes]
    return [f"--speculative-algorithm {served.sglang}{head}", *sizes]


def _tree_backend(cell: Cell) -> str:
    """Name an attention backend that takes trees, which the default one may refuse.

    With pages of more than one token every release since sglang#9784 takes flashinfer, newer ones triton and fa3, too.
    flashinfer has no attention sinks (GPT-OSS) and no trees for latent attention.
    """
    require(takes_trees(cell), "page_size", cell.page_size, "1, for trees with latent attention")
    has_sinks = read_config(cell.model)[1].get("model_type") == "gpt_oss"
    return "triton" if has_sinks or has_latent_attention(cell) else "flashinfer"


def vllm_flags(cell: Cell, config: SpecConfig, draft: str = "DRAFT_MODEL") -> str:
    """Make the options of `vllm serve`, which drafts chains."""
    flags = [f"--tensor-parallel-size {cell.tensor_parallel}", f"--block-size {config.page_size}"]
    require(config.topk == 1, "topk", config.topk, "1: vLLM drafts chains")
    if not config.is_plain:
        settings: dict[str, Any] = {"method": None, "model": draft, "num_speculative_tokens": config.num_steps}
        settings |= SERVED[cell.drafter].vllm
        if KINDS[cell.drafter].in_target:
            settings.pop("model")
        flags = [f"--speculative-config {shlex.quote(json.dumps(settings))}", *flags]
    return " ".join(flags)


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
