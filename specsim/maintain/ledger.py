"""Error ledgers: reproduced tables in the notes of papers/, figure by figure.

python -m specsim.maintain.ledger writes them anew between their marks.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from specsim.core.errors import InputError
from specsim.maintain.measurements import as_command, markdown, placed
from specsim.simulator.reproduce import reproduction
from specsim.simulator.reproduce.reproduction import Reproduction, parameter_cells

PAPERS = Path(__file__).resolve().parents[2] / "papers"
MARK = re.compile(r"<!-- (ledger (\w+)) -->")
HEADINGS = ("setting", "figure", "published", "simulated", "error", "role")
PARAMETERS = ("parameter", "value", "from", "to", "unit")


def ledger(result: Reproduction) -> str:
    """What was asked, every figure with its error, and the fitted parameters, in Markdown."""
    asked = [f"{each.what}: {each.value}, {'met' if each.is_met else 'not met'}." for each in result.asked]
    lines = [*asked, "", *markdown(HEADINGS, [figure.cells() for figure in result.figures])]
    if result.parameters:
        lines += ["", *markdown(PARAMETERS, map(parameter_cells, result.parameters))]
    return "\n".join(["", *lines, ""]) + "\n"


def tables(page: str) -> list[str]:
    """The tables whose ledgers a page holds."""
    return [name for _, name in MARK.findall(page)]


def main(arguments: Sequence[str]) -> None:
    """Write every ledger of papers/ anew."""
    if arguments:
        raise InputError("arguments", " ".join(arguments), "none")
    for path in sorted(PAPERS.glob("*/notes.md")):
        page = path.read_text(encoding="utf-8")
        for name in tables(page):
            page = placed(page, f"ledger {name}", ledger(reproduction(name)()))
            print(f"{name}: {path}")
        path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    as_command(main, sys.argv[1:])
