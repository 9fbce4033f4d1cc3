"""specsim diff: compare the fast implementation with the reference."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click

from specsim.cli.option_fields import common, option, option_fields, refuse_others
from specsim.cli.options import (
    GREEDY,
    DeviceOptions,
    GraphName,
    HtmlOptions,
    JsonOptions,
    KVFormatName,
    RuleOptions,
    TreeOptions,
    pick,
)
from specsim.cli.ranks import RankOptions, in_ranks
from specsim.core.config import SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.kinds import DEFAULT, TESTED
from specsim.core.limits import BatchSize, JobCount, NonNegativeNumber

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specsim.correctness.differential.cell import Cell
    from specsim.correctness.differential.result import GridResult

_DRAFTERS = [
    f"{name} (another vocabulary)" if kind.variant(name).differs_in == "vocabulary" else name
    for name, kind in TESTED.items()
    if kind.variant(name).differs_in != "mode"
]
_RUN = ("impl", "dtype", "device", "shard", "jobs", "resume")  # of a grid too


@dataclass(frozen=True, kw_only=True)
class DiffOptions(TreeOptions, DeviceOptions, RuleOptions, RankOptions, HtmlOptions, JsonOptions):
    """Options of specsim diff."""

    # Compare many settings: quick (half a minute), pairwise or drafters (minutes), full (hours; minutes on a GPU).
    grid: Annotated[
        Literal["quick", "pairwise", "drafters", "full"] | None,
        common("Grid", default="the one setting of the options below"),
    ] = None
    # Compare only this cell of the grid, by the name that a failure shows.
    cell: Annotated[str | None, common("Grid")] = None
    # Drafter: {names}.
    drafter: Annotated[str, common("Model", values="NAME", names=f"{', '.join(_DRAFTERS[:-1])} or {_DRAFTERS[-1]}")] = (
        DEFAULT
    )
    # Small target: llama, qwen2, qwen3, mistral, gpt_oss, qwen3_moe, deepseek_v3, noisy, twins (equal logits), wide,
    # wide_qwen3, wide_mistral, large_heads (of 128 channels, also large_heads_qwen3 and large_heads_mistral) or
    # shipped.
    family: Annotated[str, common("Model", values="NAME")] = "llama"
    # Sampling temperature; 0 is greedy.
    temperature: Annotated[NonNegativeNumber, common("Sampling")] = GREEDY.temperature
    # Batch size.
    batch: Annotated[BatchSize, common("Requests")] = 3
    # Regular expression that every other output must match; needs --family shipped.
    regex: Annotated[str | None, option("Sampling", default="none")] = None
    # Part of a round that is replayed as one CUDA graph; eager: none.
    graph: Annotated[GraphName, common("Execution")] = "eager"
    # Each implementation continues from its own state; without it, both start each phase from the same state.
    free: Annotated[bool, option("Execution")] = False
    # Implementation that is compared with the reference.
    impl: Annotated[Literal["fast", "reference"], option("Execution")] = "fast"
    # Device of that implementation.
    device: Literal["cpu", "cuda"] | None = None
    # Data type of weights and activations.
    dtype: Annotated[Literal["float32", "bfloat16"], option("Execution")] = "float32"
    # Number format of the target's KV; fp8_e4m3: 8 bits, rounded once when written.
    kv_dtype: Annotated[KVFormatName, option("Execution", default="model, as --dtype")] = "model"
    # Number format of the drafter's KV.
    draft_kv_dtype: Annotated[KVFormatName, option("Execution", default="model, as --dtype")] = "model"
    # Decode and verify forwards of the target: a kernel for each step, or one resident kernel; auto: the faster one as
    # measured.
    forward: Annotated[Literal["auto", "kernels", "persistent"], option("Execution")] = "auto"
    # Compare every n-th cell, starting at the i-th.
    shard: Annotated[str | None, option("Grid", values="i/n", default="all cells")] = None
    # Processes that share the cells.
    jobs: Annotated[JobCount, common("Execution")] = 1
    # Keep the cells that the --json file has.
    resume: Annotated[bool, common("Output")] = False
    # Write the result to this JSON file, cell by cell; its fields: specsim schema diff.
    json: Path | None = None
    # Write the first mismatch to this HTML file, a page with both sides of its round.
    html: Path | None = None

    def cells(self, config: SpecConfig) -> "tuple[str, Sequence[Cell]]":
        """Make the cells of a grid, which takes no option of a cell, or one cell; with a name."""
        from specsim.correctness import differential

        if self.grid is None:
            require(self.cell is None, "cell", self.cell, "the name of a cell, together with its --grid")
            return "one cell", (self._one_cell(config),)
        names = (*_RUN, *option_fields(RankOptions), "forward", "grid", "cell", "json", "html")
        refuse_others(self, names, "with --grid")
        cells = differential.grid(self.grid, self.dtype, self.draft_parallel if self.tensor_parallel > 1 else None)
        if self.cell is None:
            return self.grid, cells
        cells = tuple(cell for cell in cells if cell.id == self.cell)
        require(cells, "cell", self.cell, f"the name of a cell of the grid {self.grid}")
        return "one cell", cells

    def _one_cell(self, config: SpecConfig) -> "Cell":
        from specsim.core.kv_buffer import KVFormat
        from specsim.correctness.differential.cell import one_cell
        from specsim.correctness.differential.pairs import FAMILIES, KINDS

        require_choice("drafter", self.drafter, KINDS)
        require_choice("family", self.family, FAMILIES)
        if self.impl == "reference" and self.graph != "eager":
            raise InputError("graph", self.graph, "eager with impl reference, which replays nothing")
        mode = "free" if self.free else "lockstep"
        pair = f"{self.drafter}-{self.family}"
        cell = one_cell(config, self.temperature, pair, self.batch, mode, self.graph)
        cell = replace(cell, kv=(KVFormat(self.kv_dtype), KVFormat(self.draft_kv_dtype)))
        cell = cell if self.regex is None else _constrained(cell, self.regex)
        return cell if self.rule is None else _with_rule(cell, self.rule)


@in_ranks
def diff(options: DiffOptions) -> None:
    """Compare the fast implementation with the reference.

    Integers and tree structure must be equal after each phase, and floats within an error budget.

    Exit status: 0 if equal, 1 if not, 2 for bad input, 3 if a process is lost.

    Examples:
      specsim diff --grid quick
      specsim diff --topk 1 --num-steps 3 --temperature 1
    """
    from specsim.core.display import stdout_console
    from specsim.correctness import differential
    from specsim.correctness.differential.implementation import Shares
    from specsim.correctness.differential.result import show

    name, cells = options.cells(pick(SpecConfig, options))
    settings = {name: getattr(options, name) for name in _RUN}
    shares = Shares(options.tensor_parallel, options.draft_parallel, options.forward)
    result = differential.run_grid(name, cells, progress=True, shares=shares, json_file=options.json, **settings)
    show(result, stdout_console())
    if options.html is not None:
        _write_mismatch(options.html, result, cells)
    if result.failures():
        raise click.exceptions.Exit(1)


def _write_mismatch(path: Path, result: "GridResult", cells: "Sequence[Cell]") -> None:
    """Write the first mismatch as a page; nothing where there is none."""
    from specsim.core.display import paragraph, stdout_console
    from specsim.explorer.explore import write_page
    from specsim.explorer.mismatch import mismatch_document

    first = result.first_divergence
    if first is None:
        paragraph(stdout_console(), f"There is no mismatch to draw: {path} is not written.")
        return
    cell = next(cell for cell in cells if cell.id == first.cell)
    document = mismatch_document(cell, first, result.impl, result.dtype, result.device)
    write_page(path, document, f"First difference of {result.impl} and the reference")


def _constrained(cell: "Cell", pattern: str) -> "Cell":
    """Put every other request of a cell under an expression, from the first on."""
    from specsim.correctness.differential.pairs import make_pair
    from specsim.serving.guidance import Guidance

    grammar = Guidance.regex(make_pair(cell.pair), pattern)
    return replace(cell, id=f"one cell, {pattern}", grammars=dict.fromkeys(range(0, len(cell.prompts), 2), grammar))


def _with_rule(cell: "Cell", rule_path: str) -> "Cell":
    """Let a rule of a user verify."""
    from specsim.core.rule import load_rule

    rule = load_rule(rule_path)
    rule.check_config(cell.config)
    return replace(cell, id=f"{cell.id}, {rule}", rule=rule)
