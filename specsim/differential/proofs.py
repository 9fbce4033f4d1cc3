"""Results of whole grids on GPUs: kept as JSON beside the kernels, and README's table of them.

python -m specsim.differential.proofs [results of specsim diff --json ...]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "fast" / "measurements"
START, END = "<!-- proofs -->\n", "<!-- /proofs -->"
HEADINGS = ("grid", "dtype", "cells", "decisions", "undecidable", "mismatches", "largest logprob error")


def keep(path: Path) -> Path:
    """Keep what a grid came to, without its cells; a part of a grid is refused."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if value["cells"] != value["num_cells"]:
        raise ValueError(f"{path} holds {value['cells']} of {value['num_cells']} cells")
    kept = {name: each for name, each in value.items() if name != "results"}
    kept["parted"] = len(value["parted"])
    KEPT.mkdir(exist_ok=True)
    target = KEPT / f"diff-{value['grid']}-{value['dtype']}-{value['device']}.json"
    target.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return target


def table() -> str:
    """The kept results in Markdown, and where they come from."""
    values = [json.loads(path.read_text(encoding="utf-8")) for path in KEPT.glob("diff-*.json")]
    values.sort(key=lambda value: (value["num_cells"], value["dtype"] != "float32"))
    lines = ["| " + " | ".join(HEADINGS) + " |", "|---" * len(HEADINGS) + "|"]
    for value in values:
        share = value["undecidable"] / max(1, value["decisions"])
        cells = [value["grid"], value["dtype"], value["cells"], f"{value['decisions']:,}"]
        cells += [f"{value['undecidable']:,} ({share:.3%})", value["mismatches"], f"{value['max_logprob_error']:.1e}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    runs = sorted({_run(value) for value in values})
    return "\n".join([*lines, "", f"Measured on {'; '.join(runs)} (`fast/measurements/`)."]) + "\n"


def _run(value: dict) -> str:
    versions = value["versions"]
    return f"one {versions['gpu']}, torch {versions['torch']}, triton {versions['triton']}, {value['date'][:10]}"


def written(readme: str) -> str:
    """The README with the table in its place."""
    before, _, rest = readme.partition(START)
    return before + START + table() + END + rest.partition(END)[2]


def main(paths: Sequence[str]) -> None:
    """Keep these results and write the table."""
    for path in paths:
        print(keep(Path(path)))
    readme = ROOT / "README.md"
    readme.write_text(written(readme.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
