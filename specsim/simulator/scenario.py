"""A server under a load, simulated with and without speculation, and the 90 % band of its speed-up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np

from specsim.core.arguments import check_arguments
from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require
from specsim.core.limits import RequestCount
from specsim.simulator.acceptance import Option
from specsim.simulator.calibration.posterior import SIDE, Posterior, gradient, half_width
from specsim.simulator.calibration.profile import Profile, default_name, profile
from specsim.simulator.cost import CostModel, Phases
from specsim.simulator.drafter import Drafter
from specsim.simulator.efficiency import Efficiency, FittedServer, FrontEnd, Graphs
from specsim.simulator.hardware import Hardware
from specsim.simulator.model import SKEW, Model
from specsim.simulator.results import SimulatedRun
from specsim.simulator.runner import Prefill
from specsim.simulator.server import check, simulate
from specsim.simulator.workload import SimulatedWorkload

if TYPE_CHECKING:
    from specsim.core.policies.named import NamedPolicy
    from specsim.simulator.calibration.profile import Profile

_cost_model = lru_cache(maxsize=16)(CostModel)  # equal servers share what a cost model remembers
MOST_SLOTS = 2**31 - 1
LARGEST_BATCH = 512


def switched(option: Option, policy: "NamedPolicy") -> list[Option]:
    """Make the options of a policy's settings, which accept the first drafts of the same rounds."""
    allowed = "a policy of chains: the acceptance of one tree does not give that of another"
    require(all(config.topk == 1 for config in policy.settings), "adaptive", policy.name, allowed)
    page = option.config.page_size
    return [Option.plain(page) if config.is_plain else Option(config, option.acceptance) for config in policy.settings]


@check_arguments
@dataclass(frozen=True, slots=True)
class Scenario:
    """A model on some GPUs, one setting of speculation with its acceptance, and a workload."""

    model: Model
    hardware: Hardware
    drafter: Drafter | None
    option: Option
    workload: SimulatedWorkload
    tensor_parallel: int = 1  # one of model.splits
    schedule: Literal["sync", "overlap"] = "overlap"
    graphs: Graphs = "all"  # forwards in graphs: all, only the target's, or none
    prefill: Prefill = "mixed"
    max_running: int = 256  # most requests with a place
    chunk_tokens: int | None = 8192  # most prompt tokens of a step, None for no limit
    memory_share: float = 0.9  # share of the GPUs' memory for weights and KV
    efficiency: Efficiency = field(default_factory=Efficiency)
    default_parameters: tuple[
        str, ...
    ] = ()  # parameters of efficiency that keep their defaults whatever the profile says
    seed: int = 0
    plain_schedule: Literal["sync", "overlap"] | None = None  # schedule of plain decoding, None for `schedule`
    front: FrontEnd | None = None  # of the profile; None: the workload's
    profile: "Profile | None" = None  # origin of the parameters (speedup_range.with_profile); None: uncalibrated
    policy: "NamedPolicy | None" = None  # among chains, the option's and shorter ones; None: always the option's

    def __post_init__(self) -> None:
        splits = self.model.splits
        allowed = f"{', '.join(map(str, splits))}: GPUs that {self.model.name} divides among"
        require(self.tensor_parallel in splits, "tensor_parallel", self.tensor_parallel, allowed)

    def cost(self, option: Option) -> CostModel:
        """Make the cost model of an option's rounds; without drafts no drafter is loaded."""
        drafter = None if option.config.is_plain else self.drafter
        return _cost_model(
            self.hardware,
            self.model,
            drafter,
            self.efficiency,
            self.tensor_parallel,
            self.schedule_of(option),
            buckets=() if self.graphs == "none" else None,
            draft_graph=self.graphs == "all",
        )

    def slots(self, option: Option) -> int:
        """Count the KV slots in the memory that the weights leave."""
        return min(self.cost(option).kv_slots(self.memory_share), MOST_SLOTS)

    def schedule_of(self, option: Option) -> Literal["sync", "overlap"]:
        """Choose the schedule for an option."""
        return self.plain_schedule or self.schedule if option.config.is_plain else self.schedule

    def run(self, option: Option) -> SimulatedRun:
        """Serve the workload with this option."""
        serving = self.serving(option)
        cost = self.cost(option)
        if self.policy is None or option.config.is_plain:
            return simulate(cost, option, self.arriving, serving, prefill=self.prefill, seed=self.seed)
        options = switched(option, self.policy)
        policy = self.policy.make(cost)
        return simulate(cost, options, self.arriving, serving, prefill=self.prefill, policy=policy, seed=self.seed)

    @property
    def arriving(self) -> SimulatedWorkload:
        """The workload, behind the front end."""
        if self.front is None:
            return self.workload
        return replace(self.workload, intake=self.front.intake, latency=self.front.latency)

    def serving(self, option: Option) -> ServingConfig:
        """Make the settings of the server with this option; InputError if they cannot serve the workload."""
        serving = ServingConfig(self.schedule_of(option), self.max_running, self.slots(option), self.chunk_tokens)
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

    def crossover(self, most: int = LARGEST_BATCH) -> int | None:
        """Find the smallest batch, up to `most`, at which drafts cost more than they gain; None without one."""
        return next((size for size in range(1, most + 1) if self.speedup(size) < 1), None)

    def phases(self, option: Option, requests: int) -> Phases:
        """Compute the seconds of a round of `requests` requests in the middle of their mean output, by part."""
        context = int(self.workload.prompt_tokens.mean() + self.workload.output_tokens.mean() / 2)
        return self.cost(option).phases(np.full(requests, context), option.config)


MOST_REQUESTS = 1000  # requests of a workload that are served again for a band
USUAL_REQUESTS = 16  # at which the parameters that matter most are found, where requests arrive at a rate


@dataclass(frozen=True, slots=True)
class SpeedupRange:
    """A simulated speed-up with the ends of its 90 % band."""

    value: float  # the ratio
    lowest: float  # lower end of the 90 % band
    highest: float  # upper end of the 90 % band
    calibration: str  # origin of the value's parameters

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.span}), {self.calibration}"

    @property
    def span(self) -> str:
        return f"{self.lowest:.2f} to {self.highest:.2f}"


@check_arguments
def speedup_range(scenario: Scenario, requests: RequestCount) -> SpeedupRange:
    """Compute the speed-up of decoding with this number of running requests, and its band."""
    return range_of(lambda server: server.speedup(requests), scenario)


def range_of(speedup: Callable[[Scenario], float], scenario: Scenario) -> SpeedupRange:
    """Compute any speed-up of a scenario, and its band."""
    posterior = used_profile(scenario).posterior.with_priors()
    scenario_at = _at_parameters(scenario)
    half = float(half_width(lambda logs: np.log(speedup(scenario_at(logs))), posterior)[0])
    return _band(speedup(scenario), half, calibration(scenario))


def ratio_ranges(scenario: Scenario, plain: SimulatedRun, drafts: SimulatedRun) -> dict[str, SpeedupRange]:
    """Ratio of two runs of the workload in each metric that both have, drafts over plain decoding.

    For the band the first MOST_REQUESTS requests are served again at both ends of the direction in which the
    parameters' uncertainty moves the speed-up most.
    """
    values = _ratios(plain.metrics(), drafts.metrics())
    shorter = replace(scenario, workload=_first(scenario.workload, MOST_REQUESTS))
    posterior = used_profile(scenario).posterior.with_priors()
    scenario_at = _at_parameters(shorter)
    here = values if len(scenario.workload) <= MOST_REQUESTS else _served_ratios(shorter)
    ends = [_served_ratios(scenario_at(posterior.logs + side)) for side in _extremes(shorter, posterior)]
    ranges = {}
    for name, value in values.items():
        outer = [ratios[name] for ratios in ends if ratios.get(name)]
        far = max((abs(float(np.log(ratio / here[name]))) for ratio in outer if here.get(name)), default=0.0)
        half = float(np.hypot(far, SIDE * posterior.discrepancy))
        ranges[name] = _band(value, half, calibration(scenario))
    return ranges


def used_profile(scenario: Scenario) -> Profile:
    """Give the scenario's profile, or the default one of its model, whose uncertainty it shares."""
    return scenario.profile or profile(default_name(scenario.model)).on(scenario.hardware.name)


def with_profile(scenario: Scenario, profile: Profile) -> Scenario:
    """Replace a scenario's parameters and front end by a profile's, except those that the user gave."""
    profile = profile.on(scenario.hardware.name)
    calibrated = with_parameters(scenario, profile.server)
    plain_schedule = calibrated.plain_schedule or profile.structure.plain_schedule
    work = scenario.workload
    front = None if work.intake or work.latency else profile.front
    return replace(calibrated, profile=profile, plain_schedule=plain_schedule, front=front)


def with_parameters(scenario: Scenario, server: FittedServer) -> Scenario:
    """Replace a scenario's parameters by a fitted server's, except those that the user gave.

    If the table's server waits for its host, or launches kernels one by one, the result does too: the parameters
    include these times.
    """
    model = scenario.model
    overrides = scenario.efficiency.overrides | {
        name: getattr(scenario.efficiency, name) for name in scenario.default_parameters
    }
    if server.skew is not None and model.skew == SKEW:
        model = replace(model, skew=server.skew)
    plain = scenario.plain_schedule
    return replace(
        scenario,
        model=model,
        efficiency=replace(server.efficiency, **overrides),
        schedule="sync" if "sync" in (scenario.schedule, server.schedule) else "overlap",
        plain_schedule=plain and ("sync" if "sync" in (plain, server.schedule) else "overlap"),
        graphs=min(scenario.graphs, server.graphs, key=("none", "target", "all").index),
    )


def calibration(scenario: Scenario) -> str:
    """Name the origin of a scenario's parameters, to be printed with its speed-ups."""
    overrides = _overrides(scenario)
    values = ", ".join(f"{name} {value:g}" for name, value in overrides.items())
    if scenario.profile is not None:
        also = f" and {values} as given" if overrides else ""
        return f"simulated with profile {scenario.profile.name}{also}"
    return f"simulated with {values} as given, uncalibrated otherwise" if overrides else "uncalibrated, simulated"


def _overrides(scenario: Scenario) -> dict[str, float]:
    """Select the parameters that are not the profile's, or without a profile not the defaults."""
    if scenario.profile is None:
        return scenario.efficiency.overrides
    profile_efficiency = scenario.profile.server.efficiency
    values = {field.name: getattr(scenario.efficiency, field.name) for field in fields(Efficiency)}
    return {name: value for name, value in values.items() if value != getattr(profile_efficiency, name)}


def _at_parameters(scenario: Scenario) -> Callable[[np.ndarray], Scenario]:
    """Make a function that gives the scenario other values of the profile's parameters: logarithms [P]."""
    profile = used_profile(scenario)
    posterior = profile.posterior.with_priors()
    calibrated = scenario if scenario.profile is not None else with_profile(scenario, profile)
    overrides = _overrides(calibrated)

    def scenario_at(logs: np.ndarray) -> Scenario:
        shifted = replace(profile, posterior=replace(posterior, logs=logs))
        server = shifted.server
        skew = calibrated.model.skew if server.skew is None else server.skew
        model = replace(calibrated.model, skew=skew)
        front = calibrated.front and shifted.front
        return replace(calibrated, model=model, efficiency=replace(server.efficiency, **overrides), front=front)

    return scenario_at


def _extremes(scenario: Scenario, posterior: Posterior) -> tuple[np.ndarray, np.ndarray]:
    """Find the parameters' likeliest distances at both ends of the band of the speed-up, as logarithms."""
    requests = min(scenario.workload.concurrency or USUAL_REQUESTS, scenario.max_running)
    scenario_at = _at_parameters(scenario)
    logs = posterior.logs
    slopes = gradient(lambda point: np.log(scenario_at(point).speedup(requests)), logs, high=logs)[0]
    variance = float(slopes @ posterior.covariance @ slopes)
    direction = SIDE * posterior.covariance @ slopes / np.sqrt(variance) if variance > 0 else np.zeros(len(slopes))
    return direction, -direction


def _band(value: float, half: float, words: str) -> SpeedupRange:
    return SpeedupRange(value, float(value * np.exp(-half)), float(value * np.exp(half)), words)


def _served_ratios(scenario: Scenario) -> dict[str, float]:
    plain, drafts = (scenario.run(option).metrics() for option in (scenario.plain, scenario.option))
    return _ratios(plain, drafts)


def _ratios(plain: Mapping[str, float], drafts: Mapping[str, float]) -> dict[str, float]:
    """Compute ratios where both are numbers, and the first is above 0."""
    return {name: drafts[name] / value for name, value in plain.items() if value > 0 and drafts[name] >= 0}


def _first(workload: SimulatedWorkload, count: int) -> SimulatedWorkload:
    cut: Callable = lambda values: None if values is None else values[:count]  # noqa: E731
    names = ("prompt_tokens", "output_tokens", "arrivals_s", "cached_tokens")
    return replace(workload, **{name: cut(getattr(workload, name)) for name in names})
