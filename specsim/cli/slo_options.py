"""Options of plan for service-level objectives, and the highest rate within them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli.options import option
from specsim.core.errors import require

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.core.config import SpecConfig
    from specsim.simulator.cell import Cell
    from specsim.simulator.plan import Plan
    from specsim.simulator.slo import RateGoal


RUNS = 2  # most replicates of every rate: a search has many rates


@dataclass(frozen=True, slots=True)
class SloGroup:
    """Bounds on latencies, and the share of requests that has to stay within them."""

    slo: Annotated[
        str | None,
        option(
            "Search",
            "Largest TTFT, TPOT and E2E latency of a request.",
            metavar="ttft=200ms,tpot=20ms,e2e=5s",
            show_default="no bounds",
        ),
    ] = None
    attainment: Annotated[
        float,
        option("Search", "Share of requests within --slo at the highest rate. [above 0, at most 1]"),
    ] = 0.99

    def goal(self, replicates: int) -> "RateGoal | None":
        """Make the goal of the highest rate; None without bounds."""
        from specsim.simulator.slo import RateGoal, Slo

        if self.slo is None:
            allowed = "only 0.99, the default, without --slo"
            require(self.attainment == 0.99, "attainment", self.attainment, allowed)
            return None
        return RateGoal(Slo.parse(self.slo), self.attainment, min(replicates, RUNS))


def highest_rates(cell: "Cell", configs: "Sequence[SpecConfig]", goal: "RateGoal") -> dict[str, Any]:
    """Find the highest rate of the best setting and of plain decoding within the objectives."""
    from tqdm.auto import tqdm

    from specsim.simulator.slo import best_rate, highest_rate

    settings = [cell.option(config) for config in configs]
    with tqdm(total=len(settings), unit="setting", disable=None) as bar:
        best = best_rate(cell, settings, goal, bar.update)
    plain = highest_rate(cell, settings[0], goal)
    return {"attainment": goal.share, "best": best, "plain": plain}


def plain_values(rates: dict[str, Any]) -> dict[str, Any]:
    """Make a value that json can write."""
    return rates | {"best": rates["best"] and asdict(rates["best"])}


def show_slo(found: "Plan", rates: Mapping[str, Any] | None, console: "Console") -> None:
    """Print the goodput of the best setting and the highest rate within the objectives."""
    from specsim.core.display import heading, paragraph, short_setting
    from specsim.simulator.slo import ATTAINMENT, GOODPUT

    if found.slo is None or rates is None:
        return
    best = found.best
    heading(console, f"objectives: {found.slo}")
    paragraph(
        console,
        f"{short_setting(best.config)}: {best.metrics[GOODPUT]:.2f} requests a second within all of them, "
        f"{best.metrics[ATTAINMENT]:.1f}% of requests.",
    )
    share = f"{rates['attainment']:.1%}".replace(".0%", "%")
    if rates["best"] is None:
        paragraph(console, f"No setting has {share} of requests within them at any rate.")
        return
    if rates["best"].rate == math.inf:
        size = len(found.cell.workload)
        paragraph(console, f"All {size:,} requests may come at once: too few for a highest rate, give more --requests.")
        return
    highest = f"{short_setting(rates['best'].config)}, {rates['best'].rate:.2f} requests a second"
    plain = "none" if not rates["plain"] else f"{rates['plain']:.2f}"
    runs = f"{min(found.replicates, RUNS)} × {len(found.cell.workload):,} requests"
    paragraph(
        console,
        f"Highest rate with {share} of requests within them: {highest} (plain decoding: {plain}), found by bisection "
        f"to 1% with {runs}, each run from an empty server.",
    )
