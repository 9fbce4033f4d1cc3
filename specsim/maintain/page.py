"""Markdown pages: tables by columns, regions between marks, and files whose text is replaced."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "notebooks" / "guide"
REGION = re.compile(r"(<!-- ([^/>][^>]*) -->\n).*?(<!-- /\2 -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table, by its heading and the cell of a row."""

    heading: str
    value: str | Callable[[Any], Any]  # key of the row, or function of it; None is an empty cell
    format: str = ""  # of the value, as format() takes it

    def cell(self, row: Any) -> str:
        """Write the cell of a row."""
        value = self.value(row) if callable(self.value) else row[self.value]
        return "" if value is None else format(value, self.format)


def table(columns: Sequence[Column], rows: Iterable[Any]) -> list[str]:
    """Make the lines of a table with these columns."""
    return markdown([column.heading for column in columns], ([column.cell(row) for column in columns] for row in rows))


def markdown(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Make the lines of a table of these cells."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return lines + ["| " + " | ".join(map(str, cells)) + " |" for cells in rows]


def regions(page: str) -> list[str]:
    """List the names of a page's regions, each between <!-- NAME --> and <!-- /NAME -->."""
    return [name for _, name, _ in REGION.findall(page)]


def filled(page: str, text_of: Callable[[str], str | None]) -> str:
    """Fill every region with the text of its name, between blank lines; None leaves it as it is."""

    def replaced(region: re.Match[str]) -> str:
        text = text_of(region[2])
        return region[0] if text is None else f"{region[1]}\n{text.strip()}\n\n{region[3]}"

    return REGION.sub(replaced, page)


def rewrite(paths: Iterable[Path], change: Callable[[str], str]) -> None:
    """Write what `change` makes of each file's text, and print the paths of those that it altered."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        changed = change(text)
        if changed != text:
            path.write_text(changed, encoding="utf-8")
            print(path)
