"""Best setting for a model, hardware and load: simulated under the load, computed for other batches."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from specsim.core.arguments import check_arguments
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.limits import ReplicateCount
from specsim.simulator.acceptance import Option
from specsim.simulator.candidates import (
    EQUAL,
    REPLICATES,
    Metrics,
    Replicated,
    candidates,
    cheapness,
    limits_reached,
    run_replicates,
    sglang_flags,
    vllm_flags,
)
from specsim.simulator.cell import Cell
from specsim.simulator.results import GOODPUT, SimulatedRun
from specsim.simulator.scenario import USUAL_REQUESTS, Scenario, range_of, speedup_range
from specsim.simulator.schedule import Range, SteadyBatch, SteadySpeeds, schedule
from specsim.simulator.slo import Slo

THROUGHPUT = "Output Throughput (tok/s)"
OBJECTIVES = {"throughput": THROUGHPUT, "latency": "Mean E2E Latency (ms)", "goodput": GOODPUT}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting with its simulated metrics, means over its runs.

    regret: relative extra time for the same tokens over the setting that needs least (throughput), the same for
    requests within the objectives (goodput), or relative extra mean latency over the lowest (latency), on the same
    requests; 0.05 is 5 %.
    """

    config: SpecConfig
    accept_length: float  # accept length in closed form, in tokens per round
    metrics: dict[str, float]
    regret: float  # additional time (throughput, goodput) or latency over the best setting; 0.05 is 5 %
    spread: float | None  # half the width of the regret's 95 % confidence interval; None with a single run
    is_equal: bool  # whether it is as good as the best within spread and tolerance

    @classmethod
    def of(cls, runs: Replicated) -> "Candidate":
        option = runs.option
        return cls(option.config, option.accept_length, runs.metrics, runs.regret, runs.spread, runs.is_equal)


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Best setting of a server that always holds `batch` requests."""

    batch: int  # running requests
    config: SpecConfig
    tokens_per_s: float  # tokens per second, with prefill of prompts
    plain_tokens_per_s: float  # tokens per second of plain decoding
    computed_band: tuple[float, float]  # ends of the 90 % band of the computed speed-up
    is_simulated: bool  # whether it is the plan's own load

    @property
    def speedup(self) -> float:
        """Speed-up over plain decoding."""
        return self.tokens_per_s / self.plain_tokens_per_s

    @property
    def span(self) -> tuple[float, float]:
        """Ends of the speed-up's 90 % band, as wide as that of the computed speed-up."""
        low, high = self.computed_band
        half = math.sqrt(high / low)
        return self.speedup / half, self.speedup * half


@dataclass(frozen=True, slots=True)
class SettingPlan:
    """Candidate settings of a server under a load."""

    cell: Cell
    objective: str  # throughput, latency or goodput
    replicates: int  # runs of a setting, of as many requests each
    candidates: tuple[Candidate, ...]  # equal ones first, the cheapest of them at the head, then by regret
    by_batch: tuple[BatchChoice, ...]  # batches of 1, 2, 4, ... requests
    chains: tuple[Range, ...]  # best chain, or plain decoding, by batch size: what engines' schedules can express
    schedule: tuple[Range, ...]  # best setting, trees included
    slo: Slo | None = None

    @property
    def best(self) -> Candidate:
        """The cheapest of the equal settings, by draft tokens and steps."""
        return self.candidates[0]

    @property
    def best_chain(self) -> Candidate | None:
        """The cheapest of the best candidates that every engine supports; None if all are trees."""
        chains = [candidate for candidate in self.candidates if candidate.config.topk == 1]
        least = 1 + min((candidate.regret for candidate in chains), default=0.0)
        equal = [candidate for candidate in chains if candidate.is_equal or (1 + candidate.regret) / least - 1 <= EQUAL]
        return min(equal, key=lambda candidate: cheapness(candidate.config), default=None)

    @property
    def plain(self) -> Candidate | None:
        """Plain decoding; None if it was not tried."""
        return next((candidate for candidate in self.candidates if candidate.config.is_plain), None)

    def over_plain(self, row: Candidate) -> float:
        """Compute a candidate's speed-up over plain decoding, by the objective; infinite over a goodput of 0.

        InputError if plain decoding was not tried.
        """
        if self.plain is None:
            raise InputError("configs", "without plain decoding", "plain decoding among them")
        if self.objective == "goodput" and not self.plain.metrics[GOODPUT]:
            return math.inf
        cost = _cost(self.objective)
        return cost(self.plain.metrics) / cost(row.metrics)

    def band(self, row: Candidate) -> tuple[float, float]:
        """Compute the ends of the 90 % band of `over_plain`, as wide as that of decoding as many requests."""
        requests = min(self.cell.concurrency if self.cell.rate is None else USUAL_REQUESTS, self.cell.max_running)
        band = speedup_range(self.cell.serving(self.cell.option(row.config)), requests)
        value = self.over_plain(row)
        return value * band.lowest / band.value, value * band.highest / band.value

    def _over_plain(self, row: Candidate) -> dict[str, Any]:
        value = self.over_plain(row) if self.plain else math.nan
        return {"over_plain": value, "band": self.band(row)} if 0 < value < math.inf else {}

    @property
    def limits(self) -> dict[str, int]:
        """Fields of the best setting that no candidate exceeds, so that more of them might be better."""
        return limits_reached(self.best.config, [candidate.config for candidate in self.candidates])

    @property
    def crossover(self) -> int | None:
        """The smallest batch from which plain decoding is best; None if there is none."""
        plain = [choice.config.is_plain for choice in self.by_batch]
        start = len(plain) - next((index for index, is_plain in enumerate(reversed(plain)) if not is_plain), len(plain))
        return self.by_batch[start].batch if start < len(plain) else None

    def to_json(self, draft: str = "DRAFT_MODEL") -> dict[str, Any]:
        """Make a value that json can write; draft: the drafter's name in the flags."""
        return {
            "cell": self.cell.to_json(),
            "objective": self.objective,
            "replicates": self.replicates,
            "candidates": [asdict(candidate) | self._over_plain(candidate) for candidate in self.candidates],
            "by_batch": [asdict(choice) | {"speedup": choice.speedup, "span": choice.span} for choice in self.by_batch],
            "chains": [asdict(entry) for entry in self.chains],
            "schedule": [asdict(entry) for entry in self.schedule],
            "slo": self.slo.bounds if self.slo else None,
            "crossover": self.crossover,
            "limits": self.limits,
            "sglang": sglang_flags(self.cell, self.best.config, draft),
            "vllm": vllm_flags(self.cell, self.best_chain.config, draft) if self.best_chain else None,
        }


@check_arguments
def plan(
    cell: Cell,
    objective: str | None = None,
    configs: Sequence[SpecConfig] | None = None,
    replicates: ReplicateCount = REPLICATES,
    done: Callable[[], object] = lambda: None,
    slo: Slo | None = None,
) -> SettingPlan:
    """Simulate the cell under every setting, several times, each time on the same requests and uniforms.

    objective: unless given goodput with an slo, else throughput, or latency where requests arrive at a rate, which
    fixes the throughput. done: called after each of the configs · replicates runs.
    """
    objective = objective or ("goodput" if slo else None)
    objective = objective or ("latency" if cell.has_times else "throughput")
    require_choice("objective", objective, OBJECTIVES)
    require(slo or objective != "goodput", "objective", objective, "throughput or latency without --slo")
    configs = candidates(cell) if configs is None else configs
    require(configs, "configs", configs, "at least one setting")
    options = [cell.option(config) for config in configs]
    measure = slo.metrics if slo else SimulatedRun.metrics
    runs = run_replicates(cell, options, replicates, _cost(objective), done, measure)
    rows = tuple(sorted(map(Candidate.of, runs), key=_rank))
    speeds = SteadySpeeds(cell, options)
    chains = schedule(cell, [option for option in options if option.config.topk == 1], speeds)
    by_batch = tuple(_by_batch(cell, options, rows, speeds))
    return SettingPlan(cell, objective, replicates, rows, by_batch, chains, schedule(cell, options, speeds), slo)


def _cost(objective: str) -> Callable[[Metrics], float]:
    """Choose the figure of a run to minimise."""
    name = OBJECTIVES[objective]
    if objective == "latency":
        return lambda run: run[name]
    if objective == "goodput":  # a thousandth of all requests at least, which keeps the cost finite
        return lambda run: 1 / max(run[name], run["Request Throughput (req/s)"] / 1000)
    return lambda run: 1 / run[name]


def _rank(row: Candidate) -> tuple[float, ...]:
    """Order candidates: the equal ones by cheapness, then the others by regret."""
    return (0, *cheapness(row.config)) if row.is_equal else (1, row.regret)


def _by_batch(
    cell: Cell, options: Sequence[Option], rows: Sequence[Candidate], speeds: SteadySpeeds
) -> Iterator[BatchChoice]:
    """Yield the best setting of every batch size; at the closed loop's own size it is the simulated one."""
    most = speeds.most_requests
    load_size = None if cell.has_times else min(cell.concurrency, len(cell.workload), most)
    plain_row = next((row for row in rows if row.config.is_plain), None)
    for size in sorted({*(2**power for power in range(most.bit_length())), most, load_size or most}):
        if size == load_size and plain_row:
            option = next(option for option in options if option.config == rows[0].config)
            speed = rows[0].metrics[THROUGHPUT]
            plain_speed = plain_row.metrics[THROUGHPUT]
        else:
            values = {option: speeds.tokens_per_s(option, size) for option in options}
            equal = [option for option in options if max(values.values()) / values[option] - 1 <= EQUAL]
            option = min(equal, key=lambda option: cheapness(option.config))
            speed = values[option]
            plain_speed = speeds.tokens_per_s(speeds.plain, size)
        band = _band(speeds.batches[option].scenario, speeds.batches[speeds.plain].scenario, size)
        yield BatchChoice(size, option.config, speed, plain_speed, band, size == load_size and plain_row is not None)


def _band(drafts: Scenario, plain: Scenario, requests: int) -> tuple[float, float]:
    """Compute the ends of the band of a steady batch's speed-up over plain decoding."""

    def speedup(server: Scenario) -> float:
        plain_server = replace(plain, model=server.model, efficiency=server.efficiency, front=server.front)
        speed, plain_speed = (
            SteadyBatch.of(scenario).tokens_per_s(scenario.option, requests) for scenario in (server, plain_server)
        )
        return speed / plain_speed

    band = range_of(speedup, drafts)
    return band.lowest, band.highest
