"""Profiles: calibrated servers in files, and the acceptance of chains in their cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specsim.core.errors import InputError, incompleteness, require, require_choice, require_choices, require_type
from specsim.core.files import parse_json, read_text
from specsim.core.json_schema import schema_name
from specsim.simulator.acceptance_record import AcceptanceRecord, Interval
from specsim.simulator.bounds import is_number, number, probability
from specsim.simulator.calibration.observation import PRIORS, Costs, Observation, plain_name
from specsim.simulator.calibration.posterior import CONFIDENCE, SIDE, STEP, Posterior, on_another_gpu
from specsim.simulator.continuation import rates_of_lengths
from specsim.simulator.cost import CostModel
from specsim.simulator.efficiency import FittedServer, FrontEnd, Graphs
from specsim.simulator.layers import Layers
from specsim.simulator.model import Model

TOOL = "specsim calibrate"


@dataclass(frozen=True, slots=True)
class ChainAcceptance:
    """Acceptance of one drafter's chains on one target."""

    model: str  # name of the target
    drafter: str  # architecture of the drafter
    rates: tuple[float, ...]  # share of rounds that accept at least 1, 2, ... drafts
    low: float  # ends of the 90 % interval of the accept length of as many steps
    high: float  # upper end of the interval
    is_fitted: bool  # whether throughputs were fitted; accept lengths of the cells otherwise

    def __post_init__(self) -> None:
        for name in ("model", "drafter"):
            require_type(name, getattr(self, name), str, "a text")
        for rate in self.rates:
            probability("rates", rate)
        for name in ("low", "high"):
            number(name, getattr(self, name), 1)
        require_type("is_fitted", self.is_fitted, bool, "true or false")

    def record(self, profile: str) -> AcceptanceRecord:
        """Make the acceptance record of a profile of this name."""
        length = 1 + sum(self.rates)
        kind = "fitted to throughputs of chains" if self.is_fitted else "mean accept lengths of the cells"
        interval = Interval(self.low, self.high, CONFIDENCE, "the fit") if self.is_fitted else None
        return AcceptanceRecord(
            f"profile {profile}",
            TOOL,
            f"{kind}; accept lengths include the bonus token.",
            length,
            1,
            len(self.rates),
            rates=self.rates,
            interval=interval,
            pair=f"{self.model} with {self.drafter}",
        )

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write, and `of` can read."""
        figures = {name: float(f"{getattr(self, name):.4g}") for name in ("low", "high")}
        rates = [float(f"{rate:.4g}") for rate in self.rates]
        return {"model": self.model, "drafter": self.drafter, "rates": rates, **figures, "is_fitted": self.is_fitted}

    @classmethod
    def of(cls, value: Any) -> "ChainAcceptance | None":
        """Read a value that `to_json` made; None for none."""
        return None if value is None else cls(**value | {"rates": tuple(value["rates"])})


def chain_acceptance(
    model: str, drafter: str, cells: Sequence[Observation], posterior: Posterior
) -> ChainAcceptance | None:
    """Find the acceptance of the cells' chains; measured accept lengths count before fitted ones. None without chains.

    A number of steps in several cells has their mean accept length.
    """
    chains = [cell for cell in cells if not cell.config.is_plain and cell.config.topk == 1]
    lengths: dict[int, list[float]] = {}
    for cell in chains:
        if cell.accept_length is not None:
            lengths.setdefault(cell.config.num_steps, []).append(cell.accept_length)
    if lengths:
        rates = rates_of_lengths({steps: float(np.mean(values)) for steps, values in lengths.items()})
        length = 1 + sum(rates)
        return ChainAcceptance(model, drafter, rates, length, length, is_fitted=False)
    if not chains:
        return None
    steps = max(cell.config.num_steps for cell in chains)
    places = [posterior.names.index(name) for name in ("accept_rate", "accept_decay")]
    logs = posterior.logs[places]
    slopes = [(np.log(_length(logs + move, steps) / _length(logs - move, steps))) / (2 * STEP) for move in _MOVES]
    variance = np.array(slopes) @ posterior.covariance[np.ix_(places, places)] @ np.array(slopes)
    half = float(SIDE * np.sqrt(variance))
    length = _length(logs, steps)
    low, high = max(1.0, length * np.exp(-half)), min(steps + 1.0, length * np.exp(half))
    return ChainAcceptance(model, drafter, _rates(logs, steps), float(low), float(high), is_fitted=True)


_MOVES = np.diag([STEP, STEP])


def _rates(logs: np.ndarray, steps: int) -> tuple[float, ...]:
    rate, decay = np.exp(logs)
    return tuple(np.minimum(np.cumprod(rate * decay ** np.arange(steps)), 1.0).tolist())


def _length(logs: np.ndarray, steps: int) -> float:
    return 1 + sum(_rates(logs, steps))


@dataclass(frozen=True, slots=True)
class ServerStructure:
    """Parts of a server that are no numbers."""

    schedule: Literal["sync", "overlap"] = "overlap"  # part of the host: sync or overlap
    graphs: Graphs = "all"  # forwards in graphs: all, only the target's, or none
    plain_schedule: Literal["sync", "overlap"] | None = None  # of plain decoding, None for `schedule`

    def __post_init__(self) -> None:
        require_choices(self)

    def costs(self, costs: Costs) -> dict[str, CostModel]:
        """Make the cost models of servers with this structure, those of plain decoding under names of their own."""
        models = {name: self.cost(cost) for name, cost in costs.items()}
        if self.plain_schedule is None:
            return models
        return models | {plain_name(name): replace(cost, schedule=self.plain_schedule) for name, cost in models.items()}

    def cost(self, cost: CostModel) -> CostModel:
        """Make the cost model of a server with this structure."""
        buckets = () if self.graphs == "none" else None
        model = replace(cost.model, layers=merged(cost.model.layers))
        draft_graph = self.graphs == "all"
        return replace(cost, model=model, schedule=self.schedule, buckets=buckets, draft_graph=draft_graph)

    def __str__(self) -> str:
        graphs = {"all": "all forwards in graphs", "target": "drafts outside graphs", "none": "no graphs"}
        plain = f", plain decoding {self.plain_schedule}" if self.plain_schedule else ""
        return f"schedule {self.schedule}{plain}, {graphs[self.graphs]}"


def merged(layers: tuple[Layers, ...]) -> tuple[Layers, ...]:
    """Join equal layers wherever they are: the time of a forward does not depend on their order."""
    counts: dict[Layers, int] = {}
    for group in layers:
        alone = replace(group, count=1)
        counts[alone] = counts.get(alone, 0) + group.count
    return tuple(replace(group, count=count) for group, count in counts.items())


SCHEMA = schema_name("profile")
SHIPPED = Path(__file__).parents[1] / "profiles"
DEFAULT = {False: "vllm-2026-dense", True: "vllm-2026-experts"}  # by whether the model has experts
_ALLOWED = "the name of a shipped profile or a file that specsim calibrate wrote"
_OTHERS = ("skew", "intake", "latency", "accept_rate", "accept_decay")


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """A calibrated server."""

    name: str
    posterior: Posterior
    structure: ServerStructure
    provenance: Mapping[str, Any]  # tool, version, date, files with their hashes, model, hardware, cells
    acceptance: ChainAcceptance | None = None  # of the cells' chains

    @property
    def server(self) -> FittedServer:
        """The server, as cost models take it."""
        return self.at(self.posterior.logs)

    @property
    def front(self) -> FrontEnd:
        """The front end, as far as the cells depended on one."""
        values = self.posterior.values
        return FrontEnd(**{name: values[name] for name in ("intake", "latency") if name in values})

    def at(self, logs: np.ndarray) -> FittedServer:
        """Describe the server with other values of its parameters."""
        priors = {name: prior.value for name, prior in PRIORS.items() if name not in _OTHERS}
        pairs = zip(self.posterior.names, np.exp(logs).tolist(), strict=True)
        values = {name: float(np.clip(value, PRIORS[name].least, PRIORS[name].most)) for name, value in pairs}
        fitted = {name: value for name, value in values.items() if name not in _OTHERS}
        assumed = {name: value for name, value in priors.items() if name not in fitted} | {"filters": 0.0}
        fitted.pop("filters", None)
        structure = self.structure
        return FittedServer(fitted, assumed, structure.schedule, structure.graphs, values.get("skew"))

    def on(self, gpu: str) -> "Profile":
        """Move the profile to this GPU, if it is another one (another_gpu.moved)."""
        is_same = gpu in str(self.provenance.get("hardware", "")).split(", ")
        return self if is_same else replace(self, posterior=on_another_gpu(self.posterior))

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write, and `of` can read."""
        posterior = self.posterior
        parameters = {}
        for name, value in posterior.values.items():
            low, high = posterior.interval(name)
            parameters[name] = {
                "value": _rounded(value),
                "low": _rounded(low),
                "high": _rounded(high),
                "unit": PRIORS[name].unit,
                "is_determined": name in posterior.determined,
            }
        return {
            "schema": SCHEMA,
            "name": self.name,
            "schedule": self.structure.schedule,
            "graphs": self.structure.graphs,
            "plain_schedule": self.structure.plain_schedule,
            "confidence": CONFIDENCE,
            "parameters": parameters,
            "covariance": [[_rounded(value) for value in row] for row in posterior.covariance.tolist()],
            "discrepancy": _rounded(posterior.discrepancy),
            "acceptance": self.acceptance and self.acceptance.to_json(),
            "provenance": dict(self.provenance),
        }

    @classmethod
    def of(cls, value: Any, location: str) -> "Profile":
        """Read a value that `to_json` made; InputError names `location`."""
        require(isinstance(value, Mapping) and value.get("schema") == SCHEMA, "profile", location, _ALLOWED)
        try:
            parameters = value["parameters"]
            names = tuple(parameters)
            for name in names:
                require_choice("parameters", name, list(PRIORS))
            figures = [parameters[name]["value"] for name in names]
            covariance = np.array(value["covariance"], dtype=float)
            sound = all(is_number(figure) and figure > 0 for figure in (*figures, value["discrepancy"]))
            sound = sound and covariance.shape == (len(names), len(names)) and bool(np.isfinite(covariance).all())
            structure = ServerStructure(value["schedule"], value["graphs"], value["plain_schedule"])
            require(sound, "profile", location, "a profile of positive figures, with a covariance of as many rows")
            posterior = Posterior(names, np.log(figures), covariance, float(value["discrepancy"]))
            acceptance = ChainAcceptance.of(value.get("acceptance"))
            return cls(str(value["name"]), posterior, structure, dict(value["provenance"]), acceptance)
        except InputError as error:
            raise error.within(location) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError("profile", location, f"{_ALLOWED} ({incompleteness(error)})") from error


def _rounded(value: float) -> float:
    """Round to the digits that do not depend on the machine that fitted."""
    return float(f"{value:.4g}")


def names() -> tuple[str, ...]:
    """List the shipped profiles."""
    return tuple(sorted(path.stem for path in SHIPPED.glob("*.json")))


def profile(source: str) -> Profile:
    """Load a shipped profile by its name, or one from a file, as it is now."""
    path = SHIPPED / f"{source}.json" if source in names() else Path(source)
    require(path.is_file(), "profile", source, f"{', '.join(names())}, or a file that specsim calibrate wrote")
    return _parsed(read_text(path, "profile", _ALLOWED), source)


@lru_cache(maxsize=16)
def _parsed(text: str, source: str) -> Profile:
    """Read a text once for many simulations."""
    return Profile.of(parse_json(text, "profile", source, _ALLOWED), source)


def default_name(model: Model) -> str:
    """Name the profile that is used unless another one is given: the newest engine's for such a model."""
    return DEFAULT[any(group.experts for group in model.layers)]
