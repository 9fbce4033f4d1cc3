"""Reading the published tables that are shipped with the package."""

import csv
from pathlib import Path

TABLES = Path(__file__).parents[1] / "tables"


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a table, by heading."""
    with (TABLES / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))
