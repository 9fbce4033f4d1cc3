"""Range of a simulated speed-up under the parameters of all servers that published tables determine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from specsim.simulator.fitted import FittedServer, fitted_servers
from specsim.simulator.model import SKEW
from specsim.simulator.results import Run
from specsim.simulator.scenario import Scenario
from specsim.simulator.workload import Workload

MOST_REQUESTS = 1000  # requests of a workload that are served again for a range


@dataclass(frozen=True, slots=True)
class SpeedupRange:
    """A simulated speed-up with its lowest and highest value under any parameters, its own included."""

    value: float
    lowest: float
    highest: float
    calibration: str  # origin of the value's parameters

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.span}), {self.calibration}"

    @property
    def span(self) -> str:
        return f"{self.lowest:.2f} to {self.highest:.2f}"


def speedup_range(scenario: Scenario, requests: int) -> SpeedupRange:
    """Compute the speed-up of decoding with this number of running requests, and its range."""
    return range_of(lambda server: server.speedup(requests), scenario)


def range_of(speedup: Callable[[Scenario], float], scenario: Scenario) -> SpeedupRange:
    """Compute any speed-up of a scenario, and its range."""
    value = speedup(scenario)
    known = [value, *(speedup(with_parameters(scenario, server)) for server in fitted_servers())]
    return SpeedupRange(value, min(known), max(known), calibration(scenario))


def ratio_ranges(scenario: Scenario, plain: Run, drafts: Run) -> dict[str, SpeedupRange]:
    """Ratio of two runs of the workload in each metric that both have, drafts over plain decoding.

    For the range the first MOST_REQUESTS requests are served again, by every fitted server.
    """
    values = _ratios(plain.metrics(), drafts.metrics())
    shorter = replace(scenario, workload=_first(scenario.workload, MOST_REQUESTS))
    under = [_served_ratios(with_parameters(shorter, server)) for server in fitted_servers()]
    ranges = {}
    for name, value in values.items():
        known = [value, *(ratios[name] for ratios in under if name in ratios)]
        ranges[name] = SpeedupRange(value, min(known), max(known), calibration(scenario))
    return ranges


def with_parameters(scenario: Scenario, server: FittedServer) -> Scenario:
    """Replace a scenario's parameters by a fitted server's, except those that the user gave.

    If the table's server waits for its host, or launches kernels one by one, the result does too: the parameters
    include these times.
    """
    model = scenario.model
    if server.skew is not None and model.skew == SKEW:
        model = replace(model, skew=server.skew)
    plain = scenario.plain_schedule
    return replace(
        scenario,
        model=model,
        efficiency=replace(server.efficiency, **scenario.efficiency.given),
        schedule="sync" if "sync" in (scenario.schedule, server.schedule) else "overlap",
        plain_schedule=plain and ("sync" if "sync" in (plain, server.schedule) else "overlap"),
        graphs=min(scenario.graphs, server.graphs, key=("none", "target", "all").index),
    )


def calibration(scenario: Scenario) -> str:
    """Name the origin of a scenario's parameters, to be printed with its speed-ups."""
    given = scenario.efficiency.given
    if not given:
        return "uncalibrated, simulated"
    values = ", ".join(f"{name} {value:g}" for name, value in given.items())
    return f"simulated with {values} as given, uncalibrated otherwise"


def _served_ratios(scenario: Scenario) -> dict[str, float]:
    plain, drafts = (scenario.run(option).metrics() for option in (scenario.plain, scenario.option))
    return _ratios(plain, drafts)


def _ratios(plain: Mapping[str, float], drafts: Mapping[str, float]) -> dict[str, float]:
    """Compute ratios where both are numbers, and the first is above 0."""
    return {name: drafts[name] / value for name, value in plain.items() if value > 0 and drafts[name] >= 0}


def _first(workload: Workload, count: int) -> Workload:
    cut: Callable = lambda values: None if values is None else values[:count]  # noqa: E731
    names = ("prompt_tokens", "output_tokens", "arrivals_s", "cached_tokens")
    return replace(workload, **{name: cut(getattr(workload, name)) for name in names})
