"""Options of plan: files that engines read, service-level objectives, and the highest rate within them."""

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specsim.cli.option_fields import common, option, refuse_changes
from specsim.core.errors import InputError
from specsim.core.files import write_whole
from specsim.core.limits import ReplicateCount, Share

if TYPE_CHECKING:
    from rich.console import Console

    from specsim.core.config import SpecConfig
    from specsim.simulator.cell import Cell
    from specsim.simulator.plan import SettingPlan
    from specsim.simulator.slo import RateGoal


@dataclass(frozen=True, kw_only=True)
class EngineFileOptions:
    """Files with the schedule by batch size that engines read, and that of the goodput policy."""

    # Write the best chain by batch size as SGLang's --speculative-adaptive-config.
    sglang_file: Annotated[Path | None, option("Output", file="writes")] = None
    # Write the best chain by batch size as the value of vLLM's --speculative-config.
    vllm_file: Annotated[Path | None, option("Output", file="writes")] = None
    # Write the best chain by batch size as TensorRT-LLM's --config: YAML or JSON.
    tensorrt_llm_file: Annotated[Path | None, option("Output", file="writes")] = None
    # Write the cost of rounds by batch size as a policy for specsim's --adaptive.
    goodput_file: Annotated[Path | None, option("Output", values="FILE.json", file="writes")] = None

    def check_files(self) -> None:
        """Refuse a policy's file by a name that --adaptive does not take for a file."""
        if self.goodput_file is not None and self.goodput_file.suffix != ".json":
            raise InputError("goodput_file", str(self.goodput_file), "a name that ends in .json")

    def usage(self, plan: "SettingPlan", draft: str) -> list[str]:
        """List the options that give the files to the engines."""
        return [_usage(name, path, plan, draft) for name, path in self._paths().items()]

    def contents(self, plan: "SettingPlan", draft: str) -> dict[str, bytes]:
        """Make the content of each file, by its option; InputError where a plan has none."""
        if not self._paths():
            return {}
        from specsim.simulator.engine_files import text

        return {name: text(_value(name, plan, draft), path).encode() for name, path in self._paths().items()}

    def write_files(self, contents: dict[str, bytes]) -> None:
        """Write the files."""
        with ExitStack() as after:  # no file that fails costs the others
            for name, path in self._paths().items():
                after.callback(write_whole, path, contents[name], name)

    def _paths(self) -> dict[str, Path]:
        paths = {field.name: getattr(self, field.name) for field in fields(EngineFileOptions)}
        return {name: path for name, path in paths.items() if path is not None}


def _value(name: str, plan: "SettingPlan", draft: str) -> dict[str, Any]:
    """Make the value of a file."""
    from specsim.simulator.engine_files import FILES, goodput_file

    if name == "goodput_file":
        return goodput_file(plan)
    return FILES[name.removesuffix("_file")](plan.chains, plan.cell.drafter, draft)


def _usage(name: str, path: Path, plan: "SettingPlan", draft: str) -> str:
    """Write the options by which an engine reads its file."""
    from specsim.simulator.candidates import sglang_flags

    if name == "sglang_file":
        first = max(plan.chains, key=lambda chain: (chain.config.num_steps > 0, -chain.low)).config
        flags = sglang_flags(plan.cell, first, draft) or ""
        return f"SGLang: {flags} --speculative-adaptive --speculative-adaptive-config {path}"
    if name == "goodput_file":
        return f"specsim: {_tree_options(plan)} --adaptive {path}"
    if name == "vllm_file":
        return f'vLLM: --speculative-config "$(cat {path})"'
    first = plan.chains[0].config.num_steps
    fewer = any(chain.config.num_steps > first for chain in plan.chains)
    note = f" (it takes the most drafts at batch size 1: {first} at most, fewer than planned)" if fewer else ""
    return (
        f"TensorRT-LLM: trtllm-serve --config {path}{note}. A key is the highest batch size of its range, as releases "
        "1.3.0rc27 to 1.4.0rc1 read it; those before TensorRT-LLM#10860 (March 2026) take it for the lowest one, and "
        "need key 1."
    )


def _tree_options(plan: "SettingPlan") -> str:
    """Write the options of the goodput policy's setting of most steps."""
    from specsim.simulator.engine_files import deepest

    config = deepest(plan)
    size = "" if config.topk == 1 else f" --num-draft-tokens {config.num_draft_tokens}"
    return f"--topk {config.topk} --num-steps {config.num_steps}{size}"


def show_chains(plan: "SettingPlan", console: "Console") -> None:
    """Print the schedule of chains by batch size."""
    from specsim.core.display import paragraph, short_setting

    ranges = [f"{_span(chain.low, chain.high)}: {short_setting(chain.config)}" for chain in plan.chains]
    console.print()
    paragraph(console, f"Best chain by batch size, for engines that switch: {'; '.join(ranges)}.")


def _span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low} to {high}"


RUNS = 2  # most replicates of every rate: a search has many rates


@dataclass(frozen=True, kw_only=True)
class SloOptions:
    """Bounds on latencies, and the share of requests that has to stay within them."""

    # Largest TTFT, TPOT and E2E latency of a request.
    slo: Annotated[str | None, common("Search", values="ttft=200ms,tpot=20ms,e2e=5s", default="no bounds")] = None
    # Share of requests within --slo at the highest rate.
    attainment: Annotated[Share, option("Search")] = 0.99
    # Simulated runs of each setting, each with other requests.
    replicates: Annotated[ReplicateCount, option("Search")] = 8

    def goal(self) -> "RateGoal | None":
        """Make the goal of the highest rate; None without bounds."""
        if self.slo is None:
            refuse_changes(self, ("attainment",), "without --slo")
            return None
        from specsim.simulator.slo import RateGoal, Slo

        return RateGoal(Slo.parse(self.slo), self.attainment, min(self.replicates, RUNS))


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


def show_slo(plan: "SettingPlan", rates: Mapping[str, Any] | None, console: "Console") -> None:
    """Print the goodput of the best setting and the highest rate within the objectives."""
    from specsim.core.display import heading, paragraph, short_setting
    from specsim.simulator.results import ATTAINMENT, GOODPUT

    if plan.slo is None or rates is None:
        return
    best = plan.best
    heading(console, f"objectives: {plan.slo}")
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
        size = len(plan.cell.workload)
        paragraph(console, f"All {size:,} requests may come at once: too few for a highest rate, give more --requests.")
        return
    highest = f"{short_setting(rates['best'].config)}, {rates['best'].rate:.2f} requests a second"
    plain = "none" if not rates["plain"] else f"{rates['plain']:.2f}"
    runs = f"{min(plan.replicates, RUNS)} × {len(plan.cell.workload):,} requests"
    paragraph(
        console,
        f"Highest rate with {share} of requests within them: {highest} (plain decoding: {plain}), found by bisection "
        f"to 1% with {runs}, each run from an empty server.",
    )
