"""specsim diff: compare the fast implementation with the reference."""

from dataclasses import fields, replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.cli.file_options import writes
from specsim.cli.option_groups import TreeGroup, flat, with_groups
from specsim.cli.options import option
from specsim.cli.ranks import RankOptions, in_ranks
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.kinds import DEFAULT, TESTED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specsim.correctness.differential.cell import Cell
    from specsim.correctness.differential.result import GridResult

_GREEDY = SamplingParams()
_DRAFTERS = [
    f"{name} (another vocabulary)" if kind.variant(name).differs_in == "vocabulary" else name
    for name, kind in TESTED.items()
    if kind.variant(name).differs_in != "mode"
]
RANKS = tuple(each.name for each in fields(RankOptions))


@in_ranks
@with_groups
def diff(
    *,
    grid: Annotated[
        str | None,
        option(
            "Grid",
            "Compare many settings: quick (half a minute), pairwise or drafters (minutes), full (hours; minutes on a "
            "GPU).",
            metavar="quick|pairwise|drafters|full",
            show_default="the one setting of the options below",
        ),
    ] = None,
    cell: Annotated[
        str | None, option("Grid", "Compare only this cell of the grid, by the name that a failure shows.")
    ] = None,
    drafter: Annotated[
        str,
        option(
            "Model",
            f"Drafter: {', '.join(_DRAFTERS[:-1])} or {_DRAFTERS[-1]}.",
            metavar="NAME",
        ),
    ] = DEFAULT,
    family: Annotated[
        str,
        option(
            "Model",
            "Small target: llama, qwen2, qwen3, mistral, gpt_oss, qwen3_moe, deepseek_v3, noisy, twins (equal logits), "
            "wide, wide_qwen3, wide_mistral, large_heads (of 128 channels, also large_heads_qwen3 and "
            "large_heads_mistral) or shipped.",
            metavar="NAME",
        ),
    ] = "llama",
    tree: TreeGroup,
    temperature: Annotated[float, option("Sampling", "Sampling temperature; 0 is greedy. [at least 0]")] = (
        _GREEDY.temperature
    ),
    batch: Annotated[int, option("Requests", "Batch size. [at least 1]")] = 3,
    regex: Annotated[
        str | None,
        option(
            "Sampling",
            "Regular expression that every other output must match; needs --family shipped.",
            show_default="none",
        ),
    ] = None,
    rule: options.Rule = None,
    graph: Annotated[
        str,
        option(
            "Execution",
            "Part of a round that is replayed as one CUDA graph; eager: none.",
            metavar="eager|step|phase|round",
        ),
    ] = "eager",
    free: Annotated[
        bool,
        option(
            "Execution",
            "Each implementation continues from its own state; without it, both start each phase from the same state.",
            "--free",
        ),
    ] = False,
    impl: Annotated[
        str, option("Execution", "Implementation that is compared with the reference.", metavar="fast|reference")
    ] = "fast",
    device: Annotated[
        str | None,
        option(
            "Execution",
            "Device of that implementation.",
            metavar="cpu|cuda",
            show_default="cuda if there is a GPU, else cpu",
        ),
    ] = None,
    dtype: Annotated[
        str, option("Execution", "Data type of weights and activations.", metavar="float32|bfloat16")
    ] = "float32",
    kv_dtype: options.KVDtype = "model",
    draft_kv_dtype: options.DraftKVDtype = "model",
    forward: options.Forward = "auto",
    ranks: RankOptions,
    shard: Annotated[
        str | None,
        option("Grid", "Compare every n-th cell, starting at the i-th.", metavar="i/n", show_default="all cells"),
    ] = None,
    jobs: Annotated[int, option("Execution", "Processes that share the cells. [at least 1]")] = 1,
    resume: Annotated[bool, option("Output", "Keep the cells that the --json file has.", "--resume")] = False,
    json_file: Annotated[
        Path | None,
        option(
            "Output",
            "Write the result to this JSON file, cell by cell; its fields: specsim schema diff.",
            "--json",
            metavar="FILE",
            callback=writes,
        ),
    ] = None,
    html_file: Annotated[
        Path | None,
        option(
            "Output",
            "Write the first mismatch to this HTML file, a page with both sides of its round.",
            "--html",
            metavar="FILE",
            callback=writes,
        ),
    ] = None,
) -> None:
    """Compare the fast implementation with the reference.

    Integers and tree structure must be equal after each phase, and floats within an error budget.

    Exit status: 0 if equal, 1 if not, 2 for bad input, 3 if a rank fails.

    Examples:
      specsim diff --grid quick
      specsim diff --topk 1 --num-steps 3 --temperature 1
    """
    _diff(flat(locals()))


def _diff(arguments: dict[str, Any]) -> None:
    """Run a grid, which takes no option of a cell, or the one cell of the options."""
    from specsim.core.display import stdout_console
    from specsim.core.kv_buffer import KV_DTYPES, KVFormat
    from specsim.correctness import differential
    from specsim.correctness.differential.cell import one_cell
    from specsim.correctness.differential.implementation import Shares
    from specsim.correctness.differential.pairs import FAMILIES, KINDS
    from specsim.correctness.differential.result import show

    name = arguments["grid"]
    config = options.pick(SpecConfig, arguments)
    run = {key: arguments[key] for key in ("impl", "dtype", "device", "shard", "jobs", "resume", "json_file")}
    if name is not None:
        for key, parameter in signature(diff).parameters.items():
            if (
                key not in (*run, *RANKS, "forward", "grid", "cell", "html_file")
                and arguments[key] != parameter.default
            ):
                raise InputError(key, arguments[key], f"only {parameter.default}, the default, with --grid")
        shared = arguments["draft_parallel"] if arguments["tensor_parallel"] > 1 else None
        cells = differential.grid(name, arguments["dtype"], shared)
        if arguments["cell"] is not None:
            name = "one cell"
            cells = tuple(cell for cell in cells if cell.id == arguments["cell"])
            require(cells, "cell", arguments["cell"], f"the name of a cell of the grid {arguments['grid']}")
    elif arguments["cell"] is not None:
        raise InputError("cell", arguments["cell"], "the name of a cell, together with its --grid")
    else:
        choices = {"drafter": KINDS, "family": FAMILIES, "kv_dtype": KV_DTYPES, "draft_kv_dtype": KV_DTYPES}
        for key, names in choices.items():
            require_choice(key, arguments[key], names)
        if arguments["impl"] == "reference" and arguments["graph"] != "eager":
            raise InputError("graph", arguments["graph"], "eager with impl reference, which replays nothing")
        pair = f"{arguments['drafter']}-{arguments['family']}"
        mode = "free" if arguments["free"] else "lockstep"
        cell = one_cell(config, arguments["temperature"], pair, arguments["batch"], mode, arguments["graph"])
        formats = tuple(KVFormat(arguments[key]) for key in ("kv_dtype", "draft_kv_dtype"))
        cell = replace(cell, kv=formats)
        cell = cell if arguments["regex"] is None else _constrained(cell, arguments["regex"])
        cells = (cell if arguments["rule"] is None else _with_rule(cell, arguments["rule"]),)
    shares = Shares(arguments["tensor_parallel"], arguments["draft_parallel"], arguments["forward"])
    result = differential.run_grid(name or "one cell", cells, progress=True, shares=shares, **run)
    show(result, stdout_console())
    if arguments["html_file"] is not None:
        _write_mismatch(arguments["html_file"], result, cells)
    if result.failures():
        raise typer.Exit(1)


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
