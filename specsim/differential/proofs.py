"""Results of whole grids on GPUs: kept as JSON beside the kernels, and README's table of them.

python -m specsim.differential.proofs [results of specsim diff --json ...]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from specsim.config import InputError
from specsim.measurements import KEPT, ROOT, as_command, markdown, measured_on, placed, read, rewrite
from specsim.measurements import keep as keep_value

__all__ = ["KEPT", "ROOT", "keep", "main", "table", "written"]
MARK = "proofs"
HEADINGS = ("grid", "dtype", "cells", "decisions", "undecidable", "mismatches", "largest logprob error")


def keep(path: Path) -> Path:
    """Keep what a grid came to, without its cells; a part of a grid is refused."""
    value = read(path, "grid", "dtype", "device", "cells", "num_cells", "parted", "versions")
    if value["cells"] != value["num_cells"]:
        raise InputError("file", str(path), f"a whole grid, and not {value['cells']} of {value['num_cells']} cells")
    kept = {name: each for name, each in value.items() if name != "results"}
    kept["parted"] = len(value["parted"])
    return keep_value(KEPT / f"diff-{value['grid']}-{value['dtype']}-{value['device']}.json", kept)


def table() -> str:
    """The kept results in Markdown, and where they come from."""
    values = [read(path) for path in KEPT.glob("diff-*.json")]
    values.sort(key=lambda value: (value["num_cells"], value["dtype"] != "float32"))
    rows = []
    for value in values:
        share = value["undecidable"] / max(1, value["decisions"])
        cells = [value["grid"], value["dtype"], value["cells"], f"{value['decisions']:,}"]
        rows.append(
            [
                *cells,
                f"{value['undecidable']:,} ({share:.3%})",
                value["mismatches"],
                f"{value['max_logprob_error']:.1e}",
            ]
        )
    return "\n".join([*markdown(HEADINGS, rows), "", measured_on(values)]) + "\n"


def written(readme: str) -> str:
    """The README with the table in its place."""
    return placed(readme, MARK, table())


def main(paths: Sequence[str]) -> None:
    """Keep these results and write the table."""
    for path in paths:
        print(keep(Path(path)))
    rewrite(MARK, table())


if __name__ == "__main__":
    as_command(main, sys.argv[1:])
