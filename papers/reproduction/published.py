"""Published figures of a paper's folder: papers/NAME/published.toml and tables next to it.

Without a key of its own a figure has the role "computed": no parameter was fitted. `bound` makes it a limit, which the
computed figure has to keep. `columns` names the column of each argument, `only` the values of columns to keep.

    tables = ["leviathan_table4"]                 tables of `specsim simulate --table`
    [[figure]]                                    claim, where, published, by, with, role, bound
    [[rows]]                                      a figure for each row of a CSV: file, columns, only
    [[missing]]                                   claim, where, published, because
"""

import csv
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from specsim.core.errors import InputError, require

FILE = "published.toml"
WITHOUT_SOURCE = ("decisions", "reproduction")  # folders that are no papers
FRACTION_DIGITS = 4
ROLES = ("computed", "fitted", "held out")
CHOSEN = "chosen on"  # role in tables that a rule was chosen on
BOUNDS = ("at least", "at most")
KEYS = {
    "figure": {"claim", "where", "published", "by", "with", "role", "bound"},
    "rows": {"claim", "where", "published", "by", "with", "role", "bound", "file", "columns", "only"},
    "missing": {"claim", "where", "published", "because"},
}
REQUIRED = {
    "figure": ("claim", "where", "published", "by"),
    "rows": ("claim", "where", "published", "by", "file", "columns"),
    "missing": ("claim", "where", "published", "because"),
}


@dataclass(frozen=True, slots=True)
class Published:
    """A published figure, and how it is computed."""

    claim: str
    where: str  # table, section or theorem of the source
    printed: str  # as published, such as 4.04 or 10/9
    by: str  # function of this package, as module.function
    arguments: Mapping[str, Any]
    role: str = "computed"
    bound: str | None = None  # at least or at most: the printed figure is a limit

    @property
    def value(self) -> float:
        return float(Fraction(self.printed))

    @property
    def digits(self) -> int:
        """Number of decimals in print; fractions are shown with four."""
        return FRACTION_DIGITS if "/" in self.printed else len(self.printed.partition(".")[2])


@dataclass(frozen=True, slots=True)
class Missing:
    """A published figure that is not reproduced."""

    claim: str
    where: str
    printed: str
    because: str


@dataclass(frozen=True, slots=True)
class Paper:
    """Published figures of one folder."""

    folder: str
    tables: tuple[str, ...]
    figures: tuple[Published, ...]
    missing: tuple[Missing, ...]


def papers(root: Path) -> list[Paper]:
    """Read the figures of all papers; InputError for one without its file or a wrong one."""
    folders = sorted(path for path in (root / "papers").iterdir() if path.is_dir() and path.name not in WITHOUT_SOURCE)
    return [read(folder) for folder in folders]


def read(folder: Path) -> Paper:
    """Read the figures of one folder."""
    path = folder / FILE
    require(path.is_file(), "file", str(path), "a file of published figures in every folder of papers/")
    value = tomllib.loads(path.read_text(encoding="utf-8"))
    for kind, entries in value.items():
        require(kind == "tables" or kind in KEYS, f"{folder.name} entry", kind, f"tables, {', '.join(KEYS)}")
        for entry in entries if kind in KEYS else ():
            _check(f"{folder.name} {kind}", entry, kind)
    figures = [_figure(entry) for entry in value.get("figure", ())]
    for entry in value.get("rows", ()):
        figures += _rows(folder, entry)
    missing = [
        Missing(entry["claim"], entry["where"], entry["published"], entry["because"])
        for entry in value.get("missing", ())
    ]
    return Paper(folder.name, tuple(value.get("tables", ())), tuple(figures), tuple(missing))


def _check(name: str, entry: Mapping[str, Any], kind: str) -> None:
    """Check the keys of an entry; InputError names an unknown or a missing one."""
    unknown = set(entry) - KEYS[kind]
    if unknown:
        raise InputError(name, min(unknown), ", ".join(sorted(KEYS[kind])))
    missing = [key for key in REQUIRED[kind] if key not in entry]
    if missing:
        raise InputError(missing[0], None, f"a text in every {kind} of {name.split()[0]}")


def _figure(entry: Mapping[str, Any]) -> Published:
    role = entry.get("role", "computed")
    bound = entry.get("bound")
    require(role in ROLES, "role", role, ", ".join(ROLES))
    require(bound is None or bound in BOUNDS, "bound", bound, " or ".join(BOUNDS))
    arguments = entry.get("with", {})
    return Published(entry["claim"], entry["where"], entry["published"], entry["by"], arguments, role, bound)


def _rows(folder: Path, entry: Mapping[str, Any]) -> Iterator[Published]:
    """Make a figure of every row of a table; {column} in the claim is the row's text."""
    with (folder / entry["file"]).open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    only = entry.get("only", {})
    for row in table:
        if any(row[column] not in values for column, values in only.items()):
            continue
        read_row = {name: _number(row[column]) for name, column in entry["columns"].items()}
        role = row.get(entry.get("role", ""), "computed").replace(CHOSEN, "fitted")
        of_row = {
            "claim": entry["claim"].format_map(row),
            "published": row[entry["published"]],
            "with": {**entry.get("with", {}), **read_row},
            "role": role,
        }
        yield _figure({**entry, **of_row})


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
