"""Tables for a terminal, plain text for a pipe, HTML for a notebook."""

import math
import sys
from collections.abc import Sequence
from html import escape
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 100


def stdout_console() -> Console:
    """Standard output: colours and rules on a terminal, plain text of up to `PIPE_WIDTH` columns anywhere else."""
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Console(width=width, markup=False, emoji=False, highlight=False)


def heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold cyan"))


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> None:
    """Rows under their headings; a column of numbers is set flush right. Without headings the rows stand alone."""
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False, show_header=bool(columns))
    for index in range(len(rows[0])):
        numeric = all(is_number(str(row[index])) for row in rows)
        table.add_column(columns[index] if columns else "", justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def is_number(cell: str) -> bool:
    return cell == "-" or cell.lstrip("-").replace(",", "").replace(".", "", 1).isdecimal()


def figure(value: float, digits: int = 2) -> str:
    """A number as a table shows it; `-` where it is not defined."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def by_position(rates: Sequence[float]) -> str:
    return " ".join(map(figure, rates)) or "-"


def metrics_rows(generation: Any) -> list[tuple[str, str]]:
    """The figures of a specsim.generate.Generation, (name, value) each."""
    metrics, config = generation.metrics, generation.config
    tree = f"topk {config.topk}, {config.num_steps} steps, {config.num_draft_tokens} draft tokens"
    return [
        ("setting", "plain decoding" if config.is_plain else tree),
        ("finish reason", ", ".join(sorted({output.finish_reason for output in generation.outputs}))),
        ("tokens", figure(metrics["tokens"], 0)),
        ("rounds", figure(metrics["rounds"], 0)),
        ("accept length (tokens a round, bonus included)", figure(metrics["accept_length"])),
        ("accept rate (accepted over proposed drafts)", figure(metrics["accept_rate"])),
        ("rounds that accepted at least 1, 2, ... drafts", by_position(metrics["accepted_by_position"])),
        ("seconds", figure(metrics["seconds"])),
        ("tokens a second", figure(metrics["tokens_per_s"], 1)),
    ]


def generation_html(generation: Any) -> str:
    """A specsim.generate.Generation as a notebook shows it: every output, then the figures."""
    figures = "".join(_html_row(*row) for row in metrics_rows(generation))
    texts = "".join(_html_row(*row) for row in enumerate(map(_html_output, generation.outputs)))
    return f"<table>{texts}</table><table>{figures}</table>"


def _html_output(output: Any) -> str:
    return output.text or " ".join(map(str, output.token_ids))


def _html_row(name: object, text: str) -> str:
    style = "text-align:left;white-space:pre-wrap;font-family:monospace"
    return f"<tr><th style='text-align:left'>{escape(str(name))}</th><td style='{style}'>{escape(text)}</td></tr>"
