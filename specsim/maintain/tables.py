"""Generated regions of Markdown pages: GPU results, drafters and counts in the guide, ledgers in papers/.

python -m specsim.maintain.tables [RESULT ...] keeps these JSON results of GPU runs and writes every region. It also
names the kept results whose code has changed since.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from specsim.core.errors import InputError
from specsim.correctness.differential.cell import AXES
from specsim.correctness.differential.drafter_grid import DRAFTER_AXES, KINDS
from specsim.correctness.differential.grids import grid
from specsim.correctness.faults.catalogue import FAULTS
from specsim.maintain import drafter_tables, held_out_tables, kv_acceptance, result_tables
from specsim.maintain.page import ROOT, filled, markdown
from specsim.maintain.results import keep, stale
from specsim.simulator.reproduce import reproduction
from specsim.simulator.reproduce.reproduction import Reproduction, parameter_cells

_num_varied = sum(len(values) > 1 for values in DRAFTER_AXES.values())
CONTENTS = {
    "quick": "a few settings, half a minute without a GPU",
    "pairwise": f"every two values of {len(AXES)} options meet in some cell; verifiers and drafters; minutes",
    "drafters": f"every two values of {_num_varied} options, for the drafters {', '.join(KINDS)}; minutes",
    "full": "`pairwise`, and every combination of topk, steps, tree size, page size and batch, greedy and sampled; "
    "minutes on a GPU, hours without",
}
CATALOGUE = """\
The catalogue holds {} defects that speculative decoding has had, most of them from issues of SGLang and vLLM. Each is
injected into a copy of the package, and a check has to find it. It answers: *would these tests notice a real bug?*
"""
PAGES = ("README.md", "notebooks/guide/*.md", "papers/*/notes.md")
FIGURE_HEADINGS = ("setting", "figure", "published", "simulated", "error", "role")
PARAMETER_HEADINGS = ("parameter", "value", "from", "to", "unit")


def cells() -> str:
    """Make the table of the differential's grids."""
    rows = [(f"`{name}`", f"{len(grid(name)):,}", contents) for name, contents in CONTENTS.items()]
    return "\n".join(markdown(("grid", "cells", "contents"), rows))


def catalogue() -> str:
    """Make the sentences that count the fault catalogue."""
    return CATALOGUE.format(len(FAULTS))


RESULT_REGIONS: Mapping[str, Callable[[Path], str]] = {
    "figures": result_tables.figures,
    "grids": result_tables.grids,
    "proofs": result_tables.proofs,
    "performance": result_tables.performance,
}
CODE_REGIONS: Mapping[str, Callable[[], str]] = {
    "cells": cells,
    "catalogue": catalogue,
    "protocol": drafter_tables.protocol,
    "combinations": drafter_tables.combinations,
    "targets": drafter_tables.targets,
    "kv-acceptance": kv_acceptance.table,
    "acceptance": drafter_tables.acceptance,
    "six-cells": held_out_tables.six_cells,
    "left-out": held_out_tables.left_out,
    "speed-ups": held_out_tables.measured_speedups,
    "choices": held_out_tables.choices,
    "profiles": held_out_tables.profiles,
    "identities": held_out_tables.identities,
}


def pages(root: Path = ROOT) -> list[Path]:
    """Pages that may hold generated regions."""
    return [path for pattern in PAGES for path in sorted(root.glob(pattern))]


def ledger(result: Reproduction) -> str:
    """Write the targets of a reproduced table, every figure with its error, and the fitted parameters."""
    targets = [
        f"{target.name}: {target.value}, {'' if target.is_reached else 'not '}reached." for target in result.targets
    ]
    lines = [*targets, "", *markdown(FIGURE_HEADINGS, [figure.cells() for figure in result.figures])]
    if result.parameters:
        lines += ["", *markdown(PARAMETER_HEADINGS, map(parameter_cells, result.parameters))]
    return "\n".join(lines)


def region(name: str, folder: Path) -> str | None:
    """Write the text of a region, None for one that another command writes; folder: of the kept results."""
    if name in RESULT_REGIONS:
        return RESULT_REGIONS[name](folder)
    kind, _, table = name.partition(" ")
    if kind == "ledger":
        return ledger(reproduction(table)())
    return CODE_REGIONS[name]() if name in CODE_REGIONS else None


def main(arguments: Sequence[str], root: Path = ROOT) -> None:
    """Keep results and write all regions; bad input is one sentence and exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=Path, help="JSON files that commands wrote on a GPU")
    options = parser.parse_args(arguments)
    folder = root / "fast" / "measurements"
    try:
        for path in keep(options.results, folder):
            print(path)
    except InputError as error:
        print(f"specsim: {error}", file=sys.stderr)
        sys.exit(2)
    (folder / "README.md").write_text(result_tables.bench_page(folder), encoding="utf-8")
    for path in pages(root):
        text_of = partial(region, folder=folder)
        path.write_text(filled(path.read_text(encoding="utf-8"), text_of), encoding="utf-8")
    for name, modules in stale(folder).items():
        more = f" and {len(modules) - 1} more modules" if len(modules) > 1 else ""
        print(f"{name} is stale: {modules[0]}{more} changed since")


if __name__ == "__main__":
    main(sys.argv[1:])
