"""Measured figures of a server at one load and setting, and the parameters that predict them, with priors."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_int
from specsim.core.limits import MOST_RUNNING, MOST_TOKENS
from specsim.simulator.acceptance import Option, iid_of_length, mean_rounds
from specsim.simulator.bounds import number, positive
from specsim.simulator.cost import CostModel
from specsim.simulator.efficiency import Efficiency, FrontEnd
from specsim.simulator.quantization import MXFP4

Quantity = Literal["tokens_per_s", "decode_tokens_per_s", "tpot_s", "ttft_s", "itl_s", "round_s", "speedup"]
MOST_ROUNDS = 4096  # outputs beyond are taken as long ones, whose last round does not count


@dataclass(frozen=True, slots=True)
class AssumedAcceptance:
    """Acceptance of chains whose accept lengths were not measured."""

    rate: float = 0.7  # of the first draft
    decay: float = 1.0  # of a draft's rate, after an accepted one, over that of the draft before

    def length(self, num_steps: int) -> float:
        """Compute the accept length of a chain, bonus included."""
        return 1.0 + float(np.cumprod(self.rate * self.decay ** np.arange(num_steps)).sum())


@dataclass(frozen=True)
class Observation:
    """Measured figures at one load and setting."""

    label: str
    config: SpecConfig
    batch: int  # requests in flight
    accept_length: float | None  # bonus included; 1 without drafts; None: not measured
    prompt_tokens: int
    output_tokens: int
    figures: Mapping[str, float] = field(hash=False)  # by Quantity; seconds, tokens a second over all requests, ratios
    filters: bool = False  # whether requests use top-k or top-p
    source: str = ""  # server of the table, where it has several

    def __post_init__(self) -> None:
        require_int("batch", self.batch, 1, MOST_RUNNING)
        require_int("prompt_tokens", self.prompt_tokens, 1, MOST_TOKENS)
        require_int("output_tokens", self.output_tokens, 1, MOST_TOKENS)
        most = self.config.num_steps + 1 if self.config.num_steps else 1
        if self.accept_length is not None:
            number("accept_length", self.accept_length, 1, most)
        require(self.figures, "figures", self.label, "at least one measured figure")
        for name, value in self.figures.items():
            positive(f"{name} of {self.label}", value)
        if named := {"tpot_s", "itl_s"}.intersection(self.figures):
            allowed = f"at least 2 where {min(named)} was measured, which a first token alone does not have"
            require(self.output_tokens > 1, "output_tokens", self.output_tokens, allowed)

    @cached_property
    def rounds(self) -> float | None:
        """Mean rounds of a request after its first token, which the prefill gives; None without an accept length."""
        tokens = self.output_tokens - 1
        if self.accept_length is None:
            return None
        if self.config.is_plain or not 0 < tokens <= MOST_ROUNDS:
            return tokens / self.accept_length
        acceptance = iid_of_length(self.accept_length, self.config.num_steps)
        return mean_rounds(Option(self.config, acceptance), tokens)

    @property
    def context(self) -> int:
        """Mean committed tokens of a running request."""
        return self.prompt_tokens + self.output_tokens // 2

    @property
    def is_round_only(self) -> bool:
        """Whether the figures follow from a round alone, without prompts."""
        return not {"tokens_per_s", "tpot_s", "ttft_s", "itl_s"}.intersection(self.figures)

    def predict(self, cost: CostModel, front: FrontEnd, acceptance: "AssumedAcceptance") -> dict[str, float]:
        """Compute the same figures of a server that always holds `batch` requests of equal lengths."""
        length = self.accept_length or acceptance.length(self.config.num_steps)
        rounds = self.rounds or (self.output_tokens - 1) / length
        contexts = np.full(self.batch, self.context)
        round_s = cost.round(contexts, self.config)
        predicted = {"round_s": round_s, "decode_tokens_per_s": self.batch * length / round_s}
        if "speedup" in self.figures:
            predicted["speedup"] = length * plain(cost).round(contexts, SpecConfig.plain()) / round_s
        if not self.is_round_only:
            predicted |= self._served(cost, front, round_s, rounds)
        return {name: predicted[name] for name in self.figures}

    def _served(self, cost: CostModel, front: FrontEnd, round_s: float, rounds: float) -> dict[str, float]:
        """Compute the latencies of a request and the throughput, prompts of other requests included.

        A request waits for half a round, then its prompt is prefilled together with a round of the others. While it
        decodes, every other request starts once.
        """
        size = self.batch
        together = max(1.0, size / (rounds + 1))  # prompts that come in one round
        new = np.full(max(1, round(together)), self.prompt_tokens)
        others = np.full(max(0, size - len(new)), self.context)
        mixed = cost.mixed(new, np.zeros(len(new)), others, self.config)
        wait = round_s / 2 if len(others) else 0.0
        ttft = front.latency + front.intake * (1 + size) / 2 + wait + mixed
        starts = min((size - together) / together, rounds) if size > together else 0.0
        decoding = rounds * round_s + starts * max(0.0, mixed - round_s)
        tokens = max(self.output_tokens - 1, 1)
        return {
            "ttft_s": ttft,
            "tpot_s": decoding / tokens,
            "itl_s": decoding / max(rounds, 1.0),
            "tokens_per_s": size * self.output_tokens / (ttft + decoding),
        }


def plain(cost: CostModel) -> CostModel:
    """Make the cost model of the same server without a drafter."""
    return replace(cost, drafter=None)


def batches(observations: list[Observation]) -> list[int]:
    """List the different batch sizes, ascending."""
    if not observations:
        raise InputError("observations", 0, "at least one")
    return sorted({observation.batch for observation in observations})


Costs = Mapping[str, CostModel]  # servers of a table, by the model that an observation names


@dataclass(frozen=True, slots=True)
class Prior:
    """Assumption about a parameter before any measurement."""

    value: float  # median; assumed, taken from no table
    spread: float  # standard deviation of its logarithm between servers
    least: float  # bounds of the fit
    most: float
    unit: str = "s"


_PEAK = "of the peak"
PRIORS = {
    "bandwidth": Prior(0.8, 0.12, 0.02, 1.0, _PEAK),
    "compute": Prior(0.5, 0.6, 0.005, 1.0, _PEAK),
    "overlap": Prior(0.5, 0.7, 0.01, 1.0, "of the shorter"),
    "experts": Prior(0.7, 0.5, 0.01, 1.0, "of other products"),
    "mxfp4_experts": Prior(0.4, 0.6, 0.01, 1.0, "of other products"),
    "gap": Prior(5e-6, 0.7, 1e-7, 1e-3),
    "launch": Prior(3e-5, 1.0, 1e-6, 1e-2),
    "host": Prior(5e-4, 1.0, 1e-6, 1.0),
    "host_request": Prior(5e-6, 1.0, 1e-8, 1e-2),
    "host_drafts": Prior(2e-4, 1.0, 1e-7, 1e-1),
    "draft_step": Prior(5e-5, 1.0, 1e-7, 1e-1),
    "collective": Prior(8e-6, 0.7, 1e-7, 1e-3),
    "filters": Prior(3e-4, 1.0, 1e-6, 1e-1),
    "skew": Prior(1.0, 0.7, 0.05, 6.0, "unevenness of experts"),
    "intake": Prior(1e-3, 1.0, 1e-6, 1.0),
    "latency": Prior(5e-3, 1.0, 1e-5, 10.0),
    "accept_rate": Prior(0.7, 0.3, 0.02, 1.0, "of drafts"),
    "accept_decay": Prior(0.97, 0.1, 0.5, 1.0, "of the rate before"),
}
_OTHERS = ("skew", "intake", "latency", "accept_rate", "accept_decay")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Values of all parameters."""

    efficiency: Efficiency
    front: FrontEnd
    acceptance: AssumedAcceptance
    skew: float | None  # None: the model's

    @classmethod
    def of(cls, values: Mapping[str, float]) -> "Parameters":
        """Sort values by name; a missing one is its prior, except that no front end was measured."""
        full = {name: prior.value for name, prior in PRIORS.items()} | dict(values)
        efficiencies = {name: float(value) for name, value in full.items() if name not in _OTHERS}
        front = FrontEnd(float(values.get("intake", 0.0)), float(values.get("latency", 0.0)))
        rate = values.get("accept_rate", PRIORS["accept_rate"].value)
        decay = values.get("accept_decay", PRIORS["accept_decay"].value)
        skew = values.get("skew")
        acceptance = AssumedAcceptance(float(rate), float(decay))
        return cls(Efficiency(**efficiencies), front, acceptance, None if skew is None else float(skew))

    def cost(self, cost: CostModel, filters: bool) -> CostModel:
        """Make the cost model with these parameters; filters: whether requests use top-k or top-p."""
        efficiency = self.efficiency if filters else replace(self.efficiency, filters=0.0)
        model = cost.model if self.skew is None else replace(cost.model, skew=self.skew)
        return replace(cost, efficiency=efficiency, model=model)


def candidates(costs: Costs, observations: Iterable[Observation]) -> tuple[str, ...]:
    """Name the parameters that these measurements can depend on, by what the servers and settings contain."""
    seen = list(observations)
    used = [costs[observation.source] for observation in seen]
    drafts = any(not observation.config.is_plain for observation in seen)
    measured = {name for observation in seen for name in observation.figures}
    formats = {cost.model.expert_format for cost in used if any(group.experts for group in cost.model.layers)}
    is_launched = any(cost.buckets == () or (drafts and not cost.draft_graph) for cost in used)
    is_launched |= not all(observation.is_round_only for observation in seen)  # steps with prompts have no graph
    applies = {
        "experts": bool(formats - {MXFP4}),
        "mxfp4_experts": MXFP4 in formats,
        "skew": bool(formats),
        "launch": is_launched,
        "host_drafts": drafts,
        "draft_step": any(
            observation.config.num_steps and cost.drafter for observation, cost in zip(seen, used, strict=True)
        ),
        "collective": any(cost.tensor_parallel > 1 for cost in used),
        "filters": any(observation.filters for observation in seen),
        "intake": bool({"tokens_per_s", "ttft_s"} & measured),
        "latency": bool({"tokens_per_s", "ttft_s"} & measured),
        "accept_rate": any(observation.accept_length is None for observation in seen),
        "accept_decay": any(observation.accept_length is None for observation in seen),
    }
    return tuple(name for name in PRIORS if applies.get(name, True))


def plain_name(source: str) -> str:
    """Name the server of plain decoding, where it differs from that of speculation."""
    return f"{source} without drafts"
