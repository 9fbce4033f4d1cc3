"""Servers with the parameters that fits to published tables found, kept in fitted.json."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from specsim.core.errors import require_choices
from specsim.simulator.efficiency import Efficiency

Graphs = Literal["all", "target", "none"]
KEPT = Path(__file__).parent / "fitted.json"


@dataclass(frozen=True, slots=True)
class FittedServer:
    """A server as a fit describes it.

    Fields of Efficiency that it does not name have their defaults.
    """

    table: str
    server: str  # of the table
    found: Mapping[str, float]  # fields of Efficiency that were fitted
    taken: Mapping[str, float]  # fields that the fit took from elsewhere
    schedule: Literal["sync", "overlap"] = "overlap"
    graphs: Graphs = "all"  # forwards in graphs, as in Scenario
    skew: float | None = None  # of models with experts; None: the table has none

    def __post_init__(self) -> None:
        require_choices(self)

    @property
    def name(self) -> str:
        return f"{self.table}, {self.server}"

    @property
    def efficiency(self) -> Efficiency:
        return Efficiency(**self.taken, **self.found)


@cache
def fitted_servers() -> tuple[FittedServer, ...]:
    """Read the kept servers of all tables."""
    return tuple(FittedServer(**value) for value in json.loads(KEPT.read_bytes()))


def to_json(servers: Iterable[FittedServer]) -> list[dict[str, Any]]:
    """Make a value that json can write, with four digits: a fit on another machine differs in later ones."""
    return [
        asdict(each)
        | {
            part: {name: float(f"{value:.4g}") for name, value in getattr(each, part).items()}
            for part in ("found", "taken")
        }
        for each in servers
    ]
