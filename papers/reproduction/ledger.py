"""Rows of the ledger: published and computed figures with their errors, and those that are not reproduced."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

from papers.reproduction import arithmetic, pairs, rounds, rules, trees
from papers.reproduction.published import Paper, Published
from specsim.core.errors import InputError, require
from specsim.maintain.page import filled, markdown
from specsim.simulator.reproduce import reproduction

MODULES: Mapping[str, ModuleType] = {
    "arithmetic": arithmetic,
    "pairs": pairs,
    "rounds": rounds,
    "rules": rules,
    "trees": trees,
}
KEPT = ("vllm_41162",)  # tables whose fit takes a minute: `python -m specsim.maintain.tables` computes and keeps them
ROW = ("claim and source", "published", "reproduced", "error", "role", "computed by")
MISSING = ("not reproduced", "source", "published", "reason")
NOT = "not reproduced"
SUMMARY = ("paper or change", "reproduced", "mean error", "largest error", "limits kept", "not reproduced")
LEAST_DIGITS = 2  # of reproduced figures that are not whole
FUNCTIONS = "../papers/reproduction"


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the ledger."""

    claim: str
    where: str
    published: str
    reproduced: str
    role: str
    by: str
    error: float | None = None  # relative; None for a limit and for what is not reproduced
    is_kept: bool | None = None  # of a limit: whether the computed figure keeps it

    def cells(self) -> tuple[str, ...]:
        """Make the cells of the row, of another table where the figure is not reproduced."""
        if self.role == NOT:
            return (self.claim, self.where, self.published, self.by)
        if self.error is not None:
            error = "0.0%" if abs(self.error) < 5e-4 else f"{self.error:+.1%}"
        else:
            error = {True: "kept", False: "broken", None: "-"}[self.is_kept]
        return (f"{self.claim} ({self.where})", self.published, self.reproduced, error, self.role, self.by)


def function(by: str) -> Callable[..., float]:
    """Find the function that reproduces a figure."""
    module, _, name = by.partition(".")
    require(module in MODULES, "by", by, f"a function of {', '.join(MODULES)}, as module.function")
    reproduced: Any = vars(MODULES[module]).get(name)
    if name.startswith("_") or getattr(reproduced, "__module__", None) != MODULES[module].__name__:
        raise InputError("by", by, f"a public function of papers.reproduction.{module}")
    return reproduced


def rows(paper: Paper, root: Path) -> list[Row]:
    """Reproduce the figures of a paper: its own first, then those of simulated tables, then what is missing."""
    figures = [_row(figure) for figure in paper.figures]
    for name in paper.tables:
        figures += _kept(root / "papers" / paper.folder / "notes.md", name) if name in KEPT else _table(name)
    return figures + [
        Row(missing.claim, missing.where, missing.printed, "-", NOT, missing.because) for missing in paper.missing
    ]


def _row(figure: Published) -> Row:
    value = function(figure.by)(**figure.arguments)
    module, _, name = figure.by.partition(".")
    by = f"[`{name}`]({FUNCTIONS}/{module}.py#{name})"
    reproduced = f"{value:.{max(figure.digits, LEAST_DIGITS if value % 1 else 0)}f}"
    if figure.bound is None:
        error = value / figure.value - 1
        return Row(figure.claim, figure.where, figure.printed, reproduced, figure.role, by, error)
    is_kept = value >= figure.value - 1e-9 if figure.bound == "at least" else value <= figure.value + 1e-9
    printed = f"{figure.bound} {figure.printed}"
    return Row(figure.claim, figure.where, printed, reproduced, figure.role, by, is_kept=is_kept)


def _table(name: str) -> Iterator[Row]:
    """Reproduce a table of `specsim simulate --table`."""
    for figure in reproduction(name)().figures:
        _, _, published, simulated, _, _ = figure.cells()
        claim = f"{figure.setting}: {figure.quantity}"
        yield Row(claim, name, published, simulated, figure.role, _command(name), figure.error)


def _kept(notes: Path, name: str) -> Iterator[Row]:
    """Read the figures of a table from the ledger that its notes keep."""
    text = notes.read_text(encoding="utf-8")
    kept = text.split(f"<!-- ledger {name} -->\n")[1].split(f"<!-- /ledger {name} -->")[0]
    lines = [line.strip("| ").split(" | ") for line in kept.splitlines() if line.startswith("| ")]
    for setting, quantity, published, simulated, error, role in (line for line in lines if len(line) == 6):
        if re.fullmatch(r"[-+]?[\d.]+%", error):
            by = f"kept in the [notes]({notes.parent.name}/notes.md), {_command(name)}"
            claim = f"{setting}: {quantity}"
            yield Row(claim, name, published, simulated, role, by, float(error.rstrip("%")) / 100)


def _command(name: str) -> str:
    return f"`specsim simulate --table {name}`"


def with_figures(notes: str, paper_rows: Sequence[Row]) -> str:
    """Write a paper's rows between the marks of its notes; notes without marks stay as they are."""
    text = "\n".join(line.replace("](../", "](../../") for line in _tables(paper_rows))
    return filled(notes, lambda region: text if region == "reproduced" else None)


def _tables(paper_rows: Sequence[Row]) -> list[str]:
    """Write the reproduced figures of a paper, then those that are not."""
    reproduced = [row.cells() for row in paper_rows if row.role != NOT]
    missing = [row.cells() for row in paper_rows if row.role == NOT]
    lines = [*markdown(ROW, reproduced), ""] if reproduced else []
    return [*lines, *markdown(MISSING, missing), ""] if missing else lines


def page(papers: Sequence[tuple[Paper, Sequence[Row]]]) -> str:
    """Write the ledger: a summary with a row for every paper, then a section for each with all figures."""
    parts = [HEAD, *markdown(SUMMARY, [_summary(*paper) for paper in papers]), ""]
    for paper, paper_rows in papers:
        parts += [f"## {paper.folder}", "", f"[Notes]({paper.folder}/notes.md)", ""]
        parts += _tables(paper_rows)
    return "\n".join(parts)


def _summary(paper: Paper, paper_rows: Sequence[Row]) -> tuple[Any, ...]:
    errors = [abs(row.error) for row in paper_rows if row.error is not None]
    limits = [row.is_kept for row in paper_rows if row.is_kept is not None]
    return (
        f"[{paper.folder}]({paper.folder}/notes.md)",
        len(errors),
        f"{fmean(errors):.1%}" if errors else "-",
        f"{max(errors):.1%}" if errors else "-",
        f"{sum(limits)} of {len(limits)}" if limits else "-",
        sum(row.role == NOT for row in paper_rows),
    )


HEAD = """# Ledger: published figures and ours

`make papers` writes this page. Every figure in the column *reproduced* is computed by the function or command in the
last column, or read from a kept result where that says so. Published figures stand in `papers/NAME/published.toml`.
What is not reproduced is listed with the reason.

| heading | meaning |
|---|---|
| error | reproduced / published - 1; of a limit, whether our figure keeps it |
| role | *computed*: nothing was fitted; *fitted*: it determined parameters; *held out*: a fit to others predicted it |

An error says how far our model is from a measurement. It does not say that the measurement is right: some figures
contradict others of the same table.
"""
