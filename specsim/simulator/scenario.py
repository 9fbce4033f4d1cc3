"""A server and what it is asked for, simulated with speculation and without."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError
from specsim.simulator.cost import CostModel, Phases
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import Hardware
from specsim.simulator.model import Drafter, Model
from specsim.simulator.option import Option
from specsim.simulator.results import Run
from specsim.simulator.timeline import Prefill, check, simulate
from specsim.simulator.workload import Workload

MOST_SLOTS = 2**31 - 1
MOST_REQUESTS = 512


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model on tensor_parallel GPUs, one setting of speculation with what it gets accepted, and a workload.

    tensor_parallel: one of model.splits. max_running: most requests with a place; chunk_tokens: most prompt tokens of a
    step, None for no limit; memory_share: of the GPUs' memory that weights and KV may take. seed: of what chance
    decides.
    """

    model: Model
    hardware: Hardware
    drafter: Drafter | None
    option: Option
    workload: Workload
    tensor_parallel: int = 1
    schedule: Literal["sync", "overlap"] = "overlap"
    prefill: Prefill = "mixed"
    max_running: int = 256
    chunk_tokens: int | None = 8192
    memory_share: float = 0.9
    efficiency: Efficiency = field(default_factory=Efficiency)
    seed: int = 0

    def __post_init__(self):
        splits = self.model.splits
        if self.tensor_parallel not in splits:
            allowed = f"{', '.join(map(str, splits))}: GPUs that {self.model.name} divides among"
            raise InputError("tensor_parallel", self.tensor_parallel, allowed)

    def cost(self, option: Option) -> CostModel:
        """What rounds of an option take; without drafts no drafter is loaded."""
        drafter = None if option.config.is_plain else self.drafter
        return CostModel(self.hardware, self.model, drafter, self.efficiency, self.tensor_parallel, self.schedule)

    def slots(self, option: Option) -> int:
        """KV slots beside the weights."""
        return min(self.cost(option).kv_slots(self.memory_share), MOST_SLOTS)

    def run(self, option: Option) -> Run:
        """The workload served with this option."""
        serving = self.serving(option)
        return simulate(self.cost(option), option, self.workload, serving, prefill=self.prefill, seed=self.seed)

    def serving(self, option: Option) -> ServingConfig:
        """How this option is served; InputError if the workload cannot be served so."""
        serving = ServingConfig(self.schedule, self.max_running, self.slots(option), self.chunk_tokens)
        try:
            check(self.cost(option), (option,), self.workload, serving, self.prefill)
        except InputError as error:
            if error.name != "num_slots":
                raise
            allowed = f"GPUs that hold {self.model.name} and enough KV slots: {error.allowed}, not {error.value}"
            raise InputError("tensor_parallel", self.tensor_parallel, allowed) from error
        return serving

    @property
    def plain(self) -> Option:
        """Decoding without drafts."""
        return Option.plain(self.option.config.page_size)

    def speedup(self, requests: int) -> float:
        """Of decoding over plain decoding, at the same number of running requests."""
        plain, drafts = (self.phases(option, requests).total for option in (self.plain, self.option))
        return self.option.accept_length * plain / drafts

    def crossover(self, most: int = MOST_REQUESTS) -> int | None:
        """The smallest batch, up to `most`, at which drafts cost more than they bring; None where there is none."""
        return next((size for size in range(1, most + 1) if self.speedup(size) < 1), None)

    def phases(self, option: Option, requests: int) -> Phases:
        """A round of so many requests, each in the middle of its mean output."""
        context = int(self.workload.prompt_tokens.mean() + self.workload.output_tokens.mean() / 2)
        return self.cost(option).phases(np.full(requests, context), option.config)
