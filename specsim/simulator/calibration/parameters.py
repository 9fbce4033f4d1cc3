"""Parameters that a calibration may find, each with a prior: a round value and its spread between servers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from specsim.simulator.calibration.observation import Acceptance, Observation
from specsim.simulator.cost import CostModel
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.front_end import FrontEnd
from specsim.simulator.weight_format import MXFP4

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
    acceptance: Acceptance
    skew: float | None  # None: the model's

    @classmethod
    def of(cls, values: Mapping[str, float]) -> "Parameters":
        """Sort values by name; a missing one is its prior, except that no front end was measured."""
        full = {name: prior.value for name, prior in PRIORS.items()} | dict(values)
        own = {name: float(value) for name, value in full.items() if name not in _OTHERS}
        front = FrontEnd(float(values.get("intake", 0.0)), float(values.get("latency", 0.0)))
        rate = values.get("accept_rate", PRIORS["accept_rate"].value)
        decay = values.get("accept_decay", PRIORS["accept_decay"].value)
        skew = values.get("skew")
        acceptance = Acceptance(float(rate), float(decay))
        return cls(Efficiency(**own), front, acceptance, None if skew is None else float(skew))

    def cost(self, cost: CostModel, filters: bool) -> CostModel:
        """Make the cost model with these parameters; filters: whether requests use top-k or top-p."""
        efficiency = self.efficiency if filters else replace(self.efficiency, filters=0.0)
        model = cost.model if self.skew is None else replace(cost.model, skew=self.skew)
        return replace(cost, efficiency=efficiency, model=model)


def candidates(costs: Costs, observations: Iterable[Observation]) -> tuple[str, ...]:
    """Name the parameters that these measurements can depend on, by what the servers and settings contain."""
    seen = list(observations)
    used = [costs[each.source] for each in seen]
    drafts = any(not each.config.is_plain for each in seen)
    measured = {name for each in seen for name in each.figures}
    formats = {cost.model.expert_format for cost in used if any(group.experts for group in cost.model.layers)}
    is_launched = any(cost.buckets == () or (drafts and not cost.draft_graph) for cost in used)
    is_launched |= not all(each.is_round_only for each in seen)  # steps with prompts have no graph
    applies = {
        "experts": bool(formats - {MXFP4}),
        "mxfp4_experts": MXFP4 in formats,
        "skew": bool(formats),
        "launch": is_launched,
        "host_drafts": drafts,
        "draft_step": any(each.config.num_steps and cost.drafter for each, cost in zip(seen, used, strict=True)),
        "collective": any(cost.tensor_parallel > 1 for cost in used),
        "filters": any(each.filters for each in seen),
        "intake": bool({"tokens_per_s", "ttft_s"} & measured),
        "latency": bool({"tokens_per_s", "ttft_s"} & measured),
        "accept_rate": any(each.accept_length is None for each in seen),
        "accept_decay": any(each.accept_length is None for each in seen),
    }
    return tuple(name for name in PRIORS if applies.get(name, True))


def plain_name(source: str) -> str:
    """Name the server of plain decoding, where it differs from that of speculation."""
    return f"{source} without drafts"
