"""Results of proofs on GPUs: kept as JSON beside the kernels, and README's tables of them.

python -m specsim.maintain.proofs [results of specsim diff, laws, certify, faults, conformance and soak --json ...]
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specsim.core.errors import InputError
from specsim.maintain.measurements import KEPT, ROOT, as_command, markdown, measured_on, placed, read, rewrite
from specsim.maintain.measurements import keep as keep_value

__all__ = ["KEPT", "ROOT", "grids", "keep", "main", "proofs", "written"]
HEADINGS = ("grid", "dtype", "cells", "compared", "decisions", "undecidable", "mismatches", "largest logprob error")
Result = Mapping[str, Any]


def keep(path: Path) -> Path:
    """Keep what a proof of the fast column came to, without a grid's cells and a soak's programs.

    Refused are a part of a grid, a run without a GPU, one of the reference, and one that failed; but planted faults are
    kept as they were found, because their row says how many were.
    """
    value = read(path, "command", "versions", "date")
    what = value["command"].removeprefix("specsim ").split(" ")[0]
    if what not in ("diff", *TOLD) or "gpu" not in value["versions"]:
        *others, last = "diff", *TOLD
        raise InputError("file", str(path), f"what specsim {', '.join(others)} or {last} wrote on a GPU")
    for fault in _unlike_a_proof(value):
        raise InputError("file", str(path), f"a proof of the fast column, and not {fault}")
    if what == "diff":
        return _keep_grid(path)
    return keep_value(KEPT / f"{what}-cuda.json", {name: each for name, each in value.items() if name != "programs"})


def _unlike_a_proof(value: Result) -> Iterator[str]:
    rows = [each for name in ("tests", "certificates") for each in value.get(name, ()) if not each.get("is_control")]
    if "reference" in (value.get("impl"), *(each["impl"] for each in rows)):
        yield "a run of the reference"
    is_ok = value.get("is_ok", True) and all(each["passed"] for each in value.get("outcomes", ()))
    if not is_ok or value.get("failures"):
        yield "a run that failed"


def _keep_grid(path: Path) -> Path:
    value = read(path, "grid", "dtype", "device", "cells", "num_cells", "parted")
    if value["cells"] != value["num_cells"]:
        raise InputError("file", str(path), f"a whole grid, and not {value['cells']} of {value['num_cells']} cells")
    kept = {name: each for name, each in value.items() if name != "results"} | {"parted": len(value["parted"])}
    return keep_value(KEPT / f"diff-{value['grid']}-{value['dtype']}-{value['device']}.json", kept)


def grids() -> str:
    """The kept grids in Markdown, and where they come from."""
    values = [read(path) for path in KEPT.glob("diff-*.json")]
    values.sort(key=lambda value: (value["num_cells"], value["dtype"] != "float32"))
    rows = []
    for value in values:
        share = value["undecidable"] / max(1, value["decisions"])
        compared, left_out = (sum(value[name].values()) for name in ("compared", "left_out"))
        whole = f"{compared / max(1, compared + left_out):.1%}"
        cells = [value["grid"], value["dtype"], value["cells"], whole, f"{value['decisions']:,}"]
        undecidable, error = f"{value['undecidable']:,} ({share:.3%})", f"{value['max_logprob_error']:.1e}"
        rows.append([*cells, undecidable, value["mismatches"], error])
    return "\n".join([*markdown(HEADINGS, rows), "", measured_on(values)]) + "\n"


def _laws(value: Result) -> str:
    rows = [each for each in value["tests"] if not each["is_control"]]
    wrong = [each["is_rejected"] for each in value["tests"] if each["is_control"]]
    tokens, rejected = sum(each["tokens"] for each in rows), sum(each["is_rejected"] for each in rows)
    told = f"{len(rows)} laws of {tokens:,} tokens, {rejected} rejected"
    return f"{told}; of the reference's {len(wrong)} wrong engines, on the CPU, {sum(wrong)} are"


def _certificates(value: Result) -> str:
    found = {promise: [] for promise in ("lossless", "wrong")}
    for each in value["certificates"]:
        found.setdefault(each["promise"], []).append(each["total_variation_float"])
    exact, wrong = found["lossless"], found["wrong"]
    return (
        f"{sum(each == 0 for each in exact)} of {len(exact)} lossless cases exact; "
        f"{sum(each > 0 for each in wrong)} of {len(wrong)} wrong ones are not"
    )


def _faults(value: Result) -> str:
    return f"{value['as_named']} of {value['faults']} planted faults found by the field that names them"


def _conformance(value: Result) -> str:
    count = Counter(each["status"] for each in value["outcomes"])
    wrong = sum(not each["passed"] for each in value["outcomes"])
    return f"{len(value['outcomes'])} cases: {count['equal']} equal, {count['refused']} refused, {wrong} wrong"


def _soak(value: Result) -> str:
    figures = value["figures"]
    audits = f"{figures['slots audited']:,} slots audited"
    return f"{figures['requests']:,} requests, {audits}, {figures['mismatches']} mismatches"


TOLD: dict[str, Callable[[Result], str]] = {
    "sampling-test": _laws,
    "certify": _certificates,
    "faults": _faults,
    "conformance": _conformance,
    "soak": _soak,
}


def proofs() -> str:
    """What else is kept in Markdown, a row a command."""
    values = {name: read(path) for name in TOLD if (path := KEPT / f"{name}-cuda.json").is_file()}
    rows = [(f"`{value['command']}`", TOLD[name](value)) for name, value in values.items()]
    return "\n".join([*markdown(("on a GPU", "came to"), rows), "", measured_on(values.values())]) + "\n"


TABLES = {"grids": grids, "proofs": proofs}  # by their places in README


def written(readme: str) -> str:
    """The README with the tables in their places."""
    for mark, table in TABLES.items():
        readme = placed(readme, mark, table())
    return readme


def main(paths: Sequence[str]) -> None:
    """Keep these results and write the tables."""
    for path in paths:
        print(keep(Path(path)))
    for mark, table in TABLES.items():
        rewrite(mark, table())


if __name__ == "__main__":
    as_command(main, sys.argv[1:])
