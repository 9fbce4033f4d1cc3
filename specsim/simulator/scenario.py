"""A server under a load, simulated with and without speculation."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require, require_choices
from specsim.core.policies.named import NamedPolicy
from specsim.simulator.cost import CostModel, Phases
from specsim.simulator.drafter import Drafter
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.fitted import Graphs
from specsim.simulator.front_end import FrontEnd
from specsim.simulator.hardware import Hardware
from specsim.simulator.initial_state import Prefill
from specsim.simulator.model import Model
from specsim.simulator.option import Option
from specsim.simulator.results import Run
from specsim.simulator.timeline import check, simulate
from specsim.simulator.workload import Workload

if TYPE_CHECKING:
    from specsim.simulator.calibration.profile import Profile

MOST_SLOTS = 2**31 - 1
MOST_REQUESTS = 512


def switched(option: Option, policy: NamedPolicy) -> list[Option]:
    """Make the options of a policy's settings, which accept the first drafts of the same rounds."""
    allowed = "a policy of chains: the acceptance of one tree does not give that of another"
    require(all(config.topk == 1 for config in policy.settings), "adaptive", policy.name, allowed)
    page = option.config.page_size
    return [Option.plain(page) if each.is_plain else Option(each, option.acceptance) for each in policy.settings]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model on some GPUs, one setting of speculation with its acceptance, and a workload."""

    model: Model
    hardware: Hardware
    drafter: Drafter | None
    option: Option
    workload: Workload
    tensor_parallel: int = 1  # one of model.splits
    schedule: Literal["sync", "overlap"] = "overlap"
    graphs: Graphs = "all"  # forwards in graphs: all, only the target's, or none
    prefill: Prefill = "mixed"
    max_running: int = 256  # most requests with a place
    chunk_tokens: int | None = 8192  # most prompt tokens of a step, None for no limit
    memory_share: float = 0.9  # share of the GPUs' memory for weights and KV
    efficiency: Efficiency = field(default_factory=Efficiency)
    kept: tuple[str, ...] = ()  # parameters of efficiency that keep their defaults whatever the profile says
    seed: int = 0
    plain_schedule: Literal["sync", "overlap"] | None = None  # schedule of plain decoding, None for `schedule`
    front: FrontEnd | None = None  # of the profile; None: the workload's
    profile: "Profile | None" = None  # origin of the parameters (speedup_range.with_profile); None: uncalibrated
    policy: NamedPolicy | None = None  # chooses among chains, the option's and shorter ones; None: always the option's

    def __post_init__(self) -> None:
        splits = self.model.splits
        allowed = f"{', '.join(map(str, splits))}: GPUs that {self.model.name} divides among"
        require(self.tensor_parallel in splits, "tensor_parallel", self.tensor_parallel, allowed)
        require_choices(self)

    def cost(self, option: Option) -> CostModel:
        """Make the cost model of an option's rounds; without drafts no drafter is loaded."""
        drafter = None if option.config.is_plain else self.drafter
        return CostModel(
            self.hardware,
            self.model,
            drafter,
            self.efficiency,
            self.tensor_parallel,
            self._schedule(option),
            buckets=() if self.graphs == "none" else None,
            draft_graph=self.graphs == "all",
        )

    def slots(self, option: Option) -> int:
        """Count the KV slots in the memory that the weights leave."""
        return min(self.cost(option).kv_slots(self.memory_share), MOST_SLOTS)

    def _schedule(self, option: Option) -> Literal["sync", "overlap"]:
        return self.plain_schedule or self.schedule if option.config.is_plain else self.schedule

    def run(self, option: Option) -> Run:
        """Serve the workload with this option."""
        serving = self.serving(option)
        cost = self.cost(option)
        if self.policy is None or option.config.is_plain:
            return simulate(cost, option, self.arriving, serving, prefill=self.prefill, seed=self.seed)
        options = switched(option, self.policy)
        policy = self.policy.make(cost)
        return simulate(cost, options, self.arriving, serving, prefill=self.prefill, policy=policy, seed=self.seed)

    @property
    def arriving(self) -> Workload:
        """The workload, behind the front end."""
        if self.front is None:
            return self.workload
        return replace(self.workload, intake=self.front.intake, latency=self.front.latency)

    def serving(self, option: Option) -> ServingConfig:
        """Make the settings of the server with this option; InputError if they cannot serve the workload."""
        serving = ServingConfig(self._schedule(option), self.max_running, self.slots(option), self.chunk_tokens)
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
        """The option without drafts."""
        return Option.plain(self.option.config.page_size)

    def speedup(self, requests: int) -> float:
        """Compute the speed-up of decoding over plain decoding, at the same number of running requests."""
        plain, drafts = (self.phases(option, requests).total for option in (self.plain, self.option))
        return self.option.accept_length * plain / drafts

    def crossover(self, most: int = MOST_REQUESTS) -> int | None:
        """Find the smallest batch, up to `most`, at which drafts cost more than they gain; None without one."""
        return next((size for size in range(1, most + 1) if self.speedup(size) < 1), None)

    def phases(self, option: Option, requests: int) -> Phases:
        """Compute the seconds of a round of `requests` requests in the middle of their mean output, by part."""
        context = int(self.workload.prompt_tokens.mean() + self.workload.output_tokens.mean() / 2)
        return self.cost(option).phases(np.full(requests, context), option.config)
