"""specsim diff: compare the fast implementation with the reference."""

from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli import options
from specsim.cli.option_groups import TreeGroup, flat, with_groups
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.errors import InputError, require, require_choice

if TYPE_CHECKING:
    from specsim.correctness.differential.cell import Cell

_GREEDY = SamplingParams()


@with_groups
def diff(
    *,
    grid: Annotated[
        str | None,
        typer.Option(
            help="Many settings, a cell each: 8 (half a minute), 89 (minutes), 1288 (hours; on a GPU minutes).",
            metavar="quick|pairwise|full",
            show_default="the one cell of the options below",
        ),
    ] = None,
    cell: Annotated[str | None, typer.Option(help="Only this cell of the grid, as a divergence names it.")] = None,
    drafter: Annotated[str, typer.Option(help="Drafter architecture.", metavar="eagle|eagle3")] = "eagle3",
    family: Annotated[
        str, typer.Option(help="Layers of the target.", metavar="llama|qwen3|mistral|noisy|twins|shipped")
    ] = "llama",
    tree: TreeGroup,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = _GREEDY.temperature,
    batch: Annotated[int, typer.Option(help="Requests.")] = 3,
    regex: Annotated[
        str | None, typer.Option(help="Expression that every other output has to match; with --family shipped.")
    ] = None,
    graph: Annotated[str, typer.Option(help="Graphs that are replayed.", metavar="eager|step|phase|round")] = "eager",
    free: Annotated[
        bool, typer.Option("--free", help="Let implementations keep their own states between phases.")
    ] = False,
    impl: Annotated[str, typer.Option(help="Implementation that is checked.", metavar="fast|reference")] = "fast",
    device: Annotated[
        str | None,
        typer.Option(help="Its device.", metavar="cpu|cuda", show_default="a GPU if there is one"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and KV.", metavar="float32|bfloat16")] = "float32",
    shard: Annotated[str | None, typer.Option(help="Every n-th cell from the i-th.", metavar="i/n")] = None,
    jobs: Annotated[int, typer.Option(help="Processes that share the cells.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the cells that are in --json.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write results here, cell by cell.")] = None,
) -> None:
    """Compare fast with the reference, phase by phase.

    Exit status 1: not equal.
    """
    _diff(flat(locals()))


def _diff(given: dict[str, Any]) -> None:
    """Run a grid, which takes no option of a cell, or the one cell of the options."""
    from specsim.core.display import stdout_console
    from specsim.core.files import check_writable
    from specsim.correctness import differential
    from specsim.correctness.differential.grids import one_cell
    from specsim.correctness.differential.pairs import FAMILIES, KINDS
    from specsim.correctness.differential.report import show

    name = given["grid"]
    config = options.pick(SpecConfig, given)
    run = {key: given[key] for key in ("impl", "dtype", "device", "shard", "jobs", "resume", "json_file")}
    if name is not None:
        for key, parameter in signature(diff).parameters.items():
            if key not in (*run, "grid", "cell") and given[key] != parameter.default:
                raise InputError(key, given[key], f"{parameter.default}, the default, with a grid")
        cells = differential.grid(name, given["dtype"])
        if given["cell"] is not None:
            name = "one cell"
            cells = tuple(each for each in cells if each.id == given["cell"])
            require(cells, "cell", given["cell"], f"the name of a cell of the grid {given['grid']}")
    elif given["cell"] is not None:
        raise InputError("cell", given["cell"], "a name together with the grid that the cell is of")
    else:
        for key, known in (("drafter", KINDS), ("family", FAMILIES)):
            require_choice(key, given[key], known)
        if given["impl"] == "reference" and given["graph"] != "eager":
            raise InputError("graph", given["graph"], "eager with impl reference, which replays nothing")
        pair = f"{given['drafter']}-{given['family']}"
        mode = "free" if given["free"] else "lockstep"
        cell = one_cell(config, given["temperature"], pair, given["batch"], mode, given["graph"])
        cells = (cell if given["regex"] is None else _constrained(cell, given["regex"]),)
    check_writable(given["json_file"])
    result = differential.run_grid(name or "one cell", cells, progress=True, **run)
    show(result, stdout_console())
    if result.failures():
        raise typer.Exit(1)


def _constrained(cell: "Cell", pattern: str) -> "Cell":
    """Put every other request of a cell under an expression, from the first on."""
    from specsim.correctness.differential.pairs import make_pair
    from specsim.serving.guidance import Guidance

    grammar = Guidance.regex(make_pair(cell.pair), pattern)
    return replace(cell, id=f"one cell, {pattern}", grammars=dict.fromkeys(range(0, len(cell.prompts), 2), grammar))
