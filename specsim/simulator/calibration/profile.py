"""Profiles: calibrated servers in files, those of the package and a user's own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from specsim.core.errors import InputError, require, require_choice
from specsim.core.files import parse_json, read_text
from specsim.core.json_schema import schema_name
from specsim.simulator.bounds import is_number
from specsim.simulator.calibration.another_gpu import moved
from specsim.simulator.calibration.chain_acceptance import ChainAcceptance
from specsim.simulator.calibration.parameters import PRIORS
from specsim.simulator.calibration.posterior import CONFIDENCE, Posterior
from specsim.simulator.calibration.structure import Structure
from specsim.simulator.fitted import FittedServer
from specsim.simulator.front_end import FrontEnd
from specsim.simulator.model import Model

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
    structure: Structure
    provenance: Mapping[str, Any]  # tool, version, date, files with their hashes, model, hardware, cells
    acceptance: ChainAcceptance | None = None  # of the cells' chains

    @property
    def server(self) -> FittedServer:
        """The server, as cost models take it."""
        return self.at(self.posterior.logs)

    @property
    def front(self) -> FrontEnd:
        """The front end, as far as the cells depended on one."""
        known = self.posterior.values
        return FrontEnd(**{name: known[name] for name in ("intake", "latency") if name in known})

    def at(self, logs: np.ndarray) -> FittedServer:
        """Describe the server with other values of its parameters."""
        priors = {name: prior.value for name, prior in PRIORS.items() if name not in _OTHERS}
        pairs = zip(self.posterior.names, np.exp(logs).tolist(), strict=True)
        values = {name: float(np.clip(value, PRIORS[name].least, PRIORS[name].most)) for name, value in pairs}
        found = {name: value for name, value in values.items() if name not in _OTHERS}
        taken = {name: value for name, value in priors.items() if name not in found} | {"filters": 0.0}
        found.pop("filters", None)
        structure = self.structure
        return FittedServer(self.name, "", found, taken, structure.schedule, structure.graphs, values.get("skew"))

    def on(self, gpu: str) -> "Profile":
        """Move the profile to this GPU, if it is another one (another_gpu.moved)."""
        is_same = gpu in str(self.provenance.get("hardware", "")).split(", ")
        return self if is_same else replace(self, posterior=moved(self.posterior))

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
    def of(cls, value: Any, place: str) -> "Profile":
        """Read a value that `to_json` made; InputError names `place`."""
        require(isinstance(value, Mapping) and value.get("schema") == SCHEMA, "profile", place, _ALLOWED)
        try:
            parameters = value["parameters"]
            names = tuple(parameters)
            for name in names:
                require_choice("parameters", name, list(PRIORS))
            figures = [parameters[name]["value"] for name in names]
            covariance = np.array(value["covariance"], dtype=float)
            sound = all(is_number(each) and each > 0 for each in (*figures, value["discrepancy"]))
            sound = sound and covariance.shape == (len(names), len(names)) and bool(np.isfinite(covariance).all())
            structure = Structure(value["schedule"], value["graphs"], value["plain_schedule"])
            require(sound, "profile", place, "a profile of positive figures, with a covariance of as many rows")
            posterior = Posterior(names, np.log(figures), covariance, float(value["discrepancy"]))
            acceptance = ChainAcceptance.of(value.get("acceptance"))
            return cls(str(value["name"]), posterior, structure, dict(value["provenance"]), acceptance)
        except InputError as error:
            raise error.within(place) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError("profile", place, f"{_ALLOWED} ({error})") from error


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
