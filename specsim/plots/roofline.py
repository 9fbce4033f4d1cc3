"""Roofline of a forward pass: its time over the tokens it takes, with the bound of the GPU's peaks."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from specsim.core.errors import require, require_int, require_type
from specsim.plots.chart import LINES, SIZE, End, label_ends, new_chart
from specsim.plots.sheet import FAINT, FONT, Picture
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.forward import Forward
from specsim.simulator.scenario import Scenario

MOST_ROWS = 4096
IDEAL = Efficiency(bandwidth=1.0, compute=1.0, overlap=1.0, experts=1.0, mxfp4_experts=1.0, gap=0.0, collective=0.0)


def roofline(scenario: Scenario, most: int = MOST_ROWS, marks: Mapping[str, int] | None = None) -> Picture:
    """Draw the milliseconds of the target's forward pass against its tokens, those of all requests together.

    The bound is the longer of reading the weights once and of the arithmetic, both at the GPU's peak. Where the curve
    is flat, more tokens cost next to nothing, which is why verifying drafts pays. marks: names of numbers of tokens,
    such as requests times num_draft_tokens. Attention to the prefix is left out. InputError for a mark beyond `most`.
    """
    require_type("scenario", scenario, Scenario, "a Scenario of specsim.simulator.scenario")
    require_int("most", most, 2)
    marks = {} if marks is None else marks
    for name, size in marks.items():
        require_int(name, size, 1, most)
    require(len(marks) <= len(LINES), "marks", len(marks), f"at most {len(LINES)}")
    own = Forward(scenario.hardware, scenario.model, scenario.efficiency, scenario.tensor_parallel)
    rows = np.unique(np.geomspace(1, most, 96).astype(int))
    curves = {"forward pass": own, "bound": replace(own, efficiency=IDEAL)}
    title = f"{scenario.model.name} on {scenario.hardware.name}, simulated"
    figure, axes = new_chart(title, "tokens of a forward pass", "milliseconds", names=curves)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ends = []
    for (name, forward), (color, dash) in zip(curves.items(), LINES, strict=False):
        spent = [1e3 * forward.products(size, size) for size in rows.tolist()]
        axes.plot(rows, spent, color=color, linestyle=dash, linewidth=1.8, gid=f"roofline:{name}")
        ends.append(End(spent[-1], most, name, color))
    for name, size in marks.items():
        spent = 1e3 * own.products(size, size)
        axes.plot([size], [spent], "o", color=LINES[0][0], markersize=5, gid=f"mark:{name}")
        axes.annotate(name, (size, spent), (-5, 7), textcoords="offset points", ha="right",
                      color=FAINT, family=FONT, fontsize=SIZE, parse_math=False)  # fmt: skip
    axes.set_xlim(1, most)
    ticks = [4**power for power in range((most.bit_length() + 1) // 2)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.yaxis.set_major_formatter("{x:g}")
    label_ends(axes, ends)
    return figure
