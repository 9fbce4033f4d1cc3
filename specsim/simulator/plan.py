"""The best setting for a model, hardware and load: simulated for all candidates, computed by batch size."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.errors import require, require_choice
from specsim.simulator.cell import Cell
from specsim.simulator.option import Option
from specsim.simulator.policy import compare
from specsim.simulator.scenario import Scenario

_TREES = ((2, 2), (2, 3), (3, 3), (4, 3), (4, 5), (8, 3), (8, 5))
_SIZES = (4, 8, 16, 32, 64)
OBJECTIVES = {"throughput": "Output Throughput (tok/s)", "latency": "Mean E2E Latency (ms)"}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting with its simulated metrics."""

    config: SpecConfig
    accept_length: float  # closed form
    metrics: dict[str, float]
    regret: float  # relative loss of the objective against the best setting


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """The best setting of a round of `batch` requests."""

    batch: int
    config: SpecConfig
    tokens_per_s: float
    plain_tokens_per_s: float  # of plain decoding

    @property
    def speedup(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


@dataclass(frozen=True, slots=True)
class Plan:
    """Candidate settings of a server under a load."""

    cell: Cell
    objective: str
    candidates: tuple[Candidate, ...]  # best first
    by_batch: tuple[BatchChoice, ...]  # batches of 1, 2, 4, ... requests

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def best_chain(self) -> Candidate | None:
        """Best of the candidates that every engine supports; None if all are trees."""
        return next((each for each in self.candidates if each.config.topk == 1), None)

    @property
    def crossover(self) -> int | None:
        """The smallest batch from which on plain decoding is best; None if it never is."""
        plain = [choice.config.is_plain for choice in self.by_batch]
        start = len(plain) - next((index for index, is_plain in enumerate(reversed(plain)) if not is_plain), len(plain))
        return self.by_batch[start].batch if start < len(plain) else None

    def to_json(self, draft: str = "DRAFT_MODEL") -> dict[str, Any]:
        """A value that json can write; draft: the drafter's name in the flags."""
        return {
            "cell": self.cell.to_json(),
            "objective": self.objective,
            "candidates": [asdict(each) for each in self.candidates],
            "by_batch": [asdict(each) | {"speedup": each.speedup} for each in self.by_batch],
            "crossover": self.crossover,
            "sglang": sglang_flags(self.cell, self.best.config, draft),
            "vllm": vllm_flags(self.cell, self.best_chain.config, draft) if self.best_chain else None,
        }


def candidates(cell: Cell) -> list[SpecConfig]:
    """Plain decoding, every chain, and trees no wider and deeper than the shares."""
    depth = len(cell.shares)
    width = min(map(len, cell.shares), default=0)
    page = cell.page_size
    chains = [SpecConfig(1, steps, steps + 1, page) for steps in range(1, depth + 1)]
    trees = [
        SpecConfig(topk, steps, size, page)
        for topk, steps in _TREES
        for size in _SIZES
        if topk <= width and steps <= depth and steps + 1 < size <= topk + (steps - 1) * topk**2 + 1
    ]
    return [SpecConfig.plain(page), *chains, *trees]


def plan(cell: Cell, objective: str = "throughput", configs: Sequence[SpecConfig] | None = None) -> Plan:
    """Simulate the cell under every setting, on equal arrivals and lengths."""
    require_choice("objective", objective, OBJECTIVES)
    configs = candidates(cell) if configs is None else configs
    require(configs, "configs", configs, "at least one setting")
    scenario = cell.with_values(topk=1, num_steps=0, num_draft_tokens=None).scenario
    options = [cell.option(config) for config in configs]
    runs = [scenario.run(option).metrics() for option in options]
    figures = [metrics[OBJECTIVES[objective]] for metrics in runs]
    costs = [1 / figure if objective == "throughput" else figure for figure in figures]
    rows = [
        Candidate(option.config, option.accept_length, metrics, cost / min(costs) - 1)
        for option, metrics, cost in zip(options, runs, costs, strict=True)
    ]
    by_batch = tuple(_choose(scenario, options, batch) for batch in _batches(cell.max_running))
    return Plan(cell, objective, tuple(sorted(rows, key=lambda row: row.regret)), by_batch)


def policies(cell: Cell, limit: int) -> dict[str, dict[str, float]]:
    """Metrics of every policy over plain decoding and all chains, on equal traces; limit: of the off-switch."""
    scenario = cell.with_values(topk=1, num_steps=0, num_draft_tokens=None).scenario
    options = [cell.option(config) for config in candidates(cell) if config.topk == 1]
    longest = options[-1]
    runs = compare(
        scenario.cost(longest),
        options,
        scenario.workload,
        scenario.serving(longest),
        limit=limit,
        prefill=scenario.prefill,
        seed=scenario.seed,
    )
    return {name: run.metrics() for name, run in runs.items()}


def _batches(most: int) -> list[int]:
    sizes = [2**power for power in range(most.bit_length())]
    return sizes if sizes[-1] == most else [*sizes, most]


def _choose(scenario: Scenario, options: Sequence[Option], batch: int) -> BatchChoice:
    """The option of most tokens a second in a round of requests that are half done."""

    def speed(option: Option) -> float:
        return batch * option.accept_length / scenario.phases(option, batch).total

    best = max(options, key=speed)
    return BatchChoice(batch, best.config, speed(best), speed(scenario.plain))


def sglang_flags(cell: Cell, config: SpecConfig, draft: str = "DRAFT_MODEL") -> str:
    """Options of `python -m sglang.launch_server`."""
    flags = [f"--tp-size {cell.tensor_parallel}", f"--page-size {config.page_size}"]
    if not config.is_plain:
        head = "" if cell.drafter == "mtp" else f" --speculative-draft-model-path {shlex.quote(draft)}"
        flags = [
            f"--speculative-algorithm {'EAGLE3' if cell.drafter == 'eagle3' else 'EAGLE'}{head}",
            f"--speculative-num-steps {config.num_steps}",
            f"--speculative-eagle-topk {config.topk}",
            f"--speculative-num-draft-tokens {config.num_draft_tokens}",
            *flags,
        ]
    return " ".join(flags)


def vllm_flags(cell: Cell, config: SpecConfig, draft: str = "DRAFT_MODEL") -> str:
    """Options of `vllm serve`, which drafts chains."""
    flags = [f"--tensor-parallel-size {cell.tensor_parallel}", f"--block-size {config.page_size}"]
    require(config.topk == 1, "topk", config.topk, "1: vLLM drafts chains")
    if not config.is_plain:
        settings = {"method": cell.drafter, "model": draft, "num_speculative_tokens": config.num_steps}
        if cell.drafter == "mtp":
            settings.pop("model")
        flags = [f"--speculative-config {shlex.quote(json.dumps(settings))}", *flags]
    return " ".join(flags)
