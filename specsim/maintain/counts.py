"""Texts of the guide that count: cells of the differential's grids, and entries of the fault catalogue."""

from pathlib import Path

from specsim.correctness.differential.cell import AXES
from specsim.correctness.differential.drafter_grid import DRAFTER_AXES, KINDS
from specsim.correctness.differential.grids import grid
from specsim.correctness.faults.catalogue import FAULTS
from specsim.maintain.result_tables import markdown

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


def cells(_: Path | None = None) -> str:
    """Make the table of the differential's grids."""
    rows = [(f"`{name}`", f"{len(grid(name)):,}", contents) for name, contents in CONTENTS.items()]
    return "\n".join(["", *markdown(("grid", "cells", "contents"), rows), ""]) + "\n"


def catalogue(_: Path | None = None) -> str:
    """Make the sentences that count the fault catalogue."""
    return CATALOGUE.format(len(FAULTS))
