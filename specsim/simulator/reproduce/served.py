"""The benchmark of vllm#41162 as simulated servers: its runs, their requests, each model's server."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from specsim.core.config import SpecConfig
from specsim.simulator.acceptance import Callback, DraftAcceptance, DraftedRounds, Option, iid_of_length
from specsim.simulator.cost import CostModel
from specsim.simulator.drafter import drafter
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import hardware
from specsim.simulator.model import model
from specsim.simulator.reproduce.reproduction import rows
from specsim.simulator.server import simulate
from specsim.simulator.uniforms import UniformStream, keys, named_uniforms
from specsim.simulator.workload import SimulatedWorkload

REQUESTS = 10  # a client; vllm#38496 has the command of its author's benchmarks
TOKENS = 128  # of an output
EARLY = 39  # of an output that ends by itself: GPT-OSS, one client, T 0: 1191 = 9 · 128 + 39
CONFIG = SpecConfig(1, 3, 4)
GPU = "B200"
# Reading and computing overlap as in spec_bench and fast_rounds; the others are assumed.
TAKEN = {"bandwidth": 0.8, "overlap": 1 / 3, "launch": 5e-6, "host": 5e-4, "host_request": 5e-6}
SKEW = 1.0
FILTERS = 3.1e-4  # seconds, vllm#40376: top-k and top-p over 64 rows of 131072
_HALVINGS = 14


@dataclass(frozen=True, slots=True)
class ServedPair:
    """A target and its drafter."""

    model: str
    drafter: str
    draft_vocab: int | None = None
    filters: bool = False  # whether the target's own settings have top-p


PAIRS = {
    "Llama3 8B": ServedPair("llama-3-8b", "eagle", filters=True),
    "Qwen3 8B": ServedPair("qwen3-8b", "eagle3", 32000, filters=True),
    "GLM 4.7 Flash": ServedPair("glm-4.7-flash", "mtp"),
    "GPT-OSS 20B": ServedPair("gpt-oss-20b", "eagle3", 32000),
}


@dataclass(frozen=True, slots=True)
class ServedCell:
    """One model at one temperature and number of clients."""

    model: str
    temperature: float
    clients: int
    runs: Mapping[str, Mapping[str, float]]  # by side (before, after), figures by their names

    @property
    def label(self) -> str:
        return f"{self.model}, T {self.temperature:.0f}, {self.clients} client{'s' * (self.clients > 1)}"

    def mean(self, name: str) -> float:
        """Compute the mean of a figure over the runs."""
        return float(np.mean([run[name] for run in self.runs.values()]))

    @property
    def prompt_tokens(self) -> float:
        """Derive the mean tokens of a request's prompt."""
        prompts = self.mean("Total Token Throughput (tok/s)") - self.mean("Output Throughput (tok/s)")
        return prompts / self.mean("Request Throughput (req/s)")

    @property
    def output_tokens(self) -> float:
        """Derive the mean tokens of a request's output."""
        return self.mean("Output Throughput (tok/s)") / self.mean("Request Throughput (req/s)")


def read() -> list[ServedCell]:
    """Read the cells of the table, sorted."""
    runs_by_cell: dict[tuple[str, float, int], dict[str, dict[str, float]]] = {}
    for row in rows("vllm_41162"):
        runs = runs_by_cell.setdefault((row["model"], float(row["temperature"]), int(row["concurrency"])), {})
        runs.setdefault(row["side"], {})[row["metric"]] = float(row["value"])
    return [ServedCell(*key, runs) for key, runs in sorted(runs_by_cell.items())]


@dataclass(frozen=True, slots=True)
class Bench:
    """Requests of a cell's clients, and the acceptance of their drafts."""

    cell: ServedCell
    workload: SimulatedWorkload
    option: Option

    @classmethod
    def of(cls, cell: ServedCell) -> "Bench":
        outputs = _outputs(REQUESTS * cell.clients, cell.output_tokens)
        prompts = np.full(len(outputs), round(cell.prompt_tokens))
        acceptance = _matched(cell.mean("Spec Decode Accept Length"), outputs)
        return cls(cell, SimulatedWorkload(prompts, outputs, concurrency=cell.clients), Option(CONFIG, acceptance))

    def metrics(self, values: Mapping[str, float], filters: float = FILTERS) -> dict[str, float]:
        """Compute the figures of a server with these efficiencies, and this intake and latency of its front end."""
        pair = PAIRS[self.cell.model]
        target = replace(model(pair.model), skew=SKEW)
        efficiencies = {name: value for name, value in values.items() if name not in ("intake", "latency")}
        filters *= pair.filters and self.cell.temperature > 0
        cost = CostModel(
            hardware(GPU),
            target,
            drafter(pair.drafter, target, pair.draft_vocab),
            Efficiency(filters=filters, **TAKEN, **efficiencies),
        )
        workload = replace(self.workload, intake=values["intake"], latency=values["latency"])
        return simulate(cost, self.option, workload).metrics()


def _outputs(requests: int, mean: float) -> np.ndarray:
    """Make the tokens of every output with this mean: TOKENS, or about EARLY for some, evenly spread."""
    outputs = np.full(requests, TOKENS)
    missing = round(requests * (TOKENS - mean))
    early = round(missing / (TOKENS - EARLY))
    if early:
        outputs[np.linspace(0, requests - 1, early + 2)[1:-1].round().astype(int)] = TOKENS - round(missing / early)
    return outputs


def _matched(length: float, outputs: np.ndarray) -> DraftAcceptance:
    """Find the acceptance under which the rounds of all requests together have this accept length.

    Requests have their own uniforms. All drafts are accepted with the same probability, but none of an output that ends
    early.
    """
    low = 1.0
    high = CONFIG.num_steps + 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _played(_acceptance(middle, outputs), outputs) < length:
            low = middle
        else:
            high = middle
    return _acceptance(low, outputs)


def _acceptance(length: float, outputs: np.ndarray) -> DraftAcceptance:
    iid = iid_of_length(length, CONFIG.num_steps)
    is_early = outputs < TOKENS
    if not is_early.any():
        return iid
    return Callback(lambda rounds: np.where(is_early[rounds.request_ids], 0, iid.accepted(rounds)), CONFIG.num_steps)


def _played(acceptance: DraftAcceptance, outputs: np.ndarray) -> float:
    """Compute the accept length that a simulated server counts, seed 0."""
    requests = np.arange(len(outputs))
    names = keys(0, UniformStream.ROUND, requests)
    put_out = np.ones(len(outputs), dtype=np.int64)
    rounds = np.zeros(len(outputs), dtype=np.int64)
    drafts = 0
    while len(running := requests[put_out < outputs]):
        places = put_out[running] - 1
        drawn = DraftedRounds(running, rounds[running], places, named_uniforms(names[running], places))
        accepted = acceptance.accepted(drawn)
        put_out[running] += accepted + 1
        rounds[running] += 1
        drafts += int(accepted.sum())
    return 1 + drafts / int(rounds.sum())
