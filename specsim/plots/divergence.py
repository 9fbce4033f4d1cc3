"""Picture of the first divergence of two implementations: phases that were equal, and the field that was not."""

from textwrap import wrap

from specsim.core.arguments import check_arguments
from specsim.core.errors import round_name
from specsim.correctness.differential.result import Divergence
from specsim.plots.sheet import (
    ACCEPTED,
    EM,
    FREE,
    WIDTH,
    Look,
    Picture,
    draw_cell,
    draw_legend,
    draw_text,
    new_sheet,
)

PHASES = ("prefill", "draft", "verify", "draft_extend")
EQUAL = Look("equal", ACCEPTED.face, ACCEPTED.edge)
WRONG = Look("first difference", "#FBE0B0", "#A35F00", 2.0, dashed=True)
NEVER = Look("not reached", FREE.face, FREE.edge)
MOST_ROUNDS = 12  # drawn, the last ones


@check_arguments
def divergence(difference: Divergence) -> Picture:
    """Draw rounds down and phases across up to the first difference, and both implementations' values below.

    difference: GridResult.first_divergence of a differential, whose rounds count from 1. Rounds long before it are
    left out.
    """
    first = max(0, difference.round - MOST_ROUNDS + 1)
    rounds = range(first, difference.round + 1)
    height = 0.26
    top = 0.8
    texts = [
        f"{side}: {str(value)[:400]}"
        for side, value in (("reference", difference.reference), ("fast", difference.fast))
    ]
    lines = [line for text in texts for line in wrap(text, int((WIDTH - 0.4) / (7.5 * EM)))]
    bottom = top + height * len(rounds)
    figure, axes = new_sheet(WIDTH, bottom + 0.6 + 0.17 * len(lines) + 0.35)
    draw_text(axes, 0.2, 0.22, str(difference).split(f": {difference.field} is ")[0], 9.5, weight="bold")
    for column, phase in enumerate(PHASES):
        draw_text(axes, 1.2 + 2.1 * column, 0.62, phase.replace("_", "-"), 7.5)
    for row, number in enumerate(rounds):
        y = top + row * height
        draw_text(axes, 0.2, y + height / 2, round_name(number) if number else "start", 7.5)
        for column, phase in enumerate(PHASES):
            if (phase == "prefill") != (number == 0):
                continue
            look = _look(difference, number, phase)
            draw_cell(axes, 1.2 + 2.1 * column, y + 0.03, 1.95, height - 0.06, look, f"{phase}:{number}")
            if look is WRONG:
                draw_text(axes, 1.25 + 2.1 * column, y + height / 2, difference.field[:26], 7)
    for row, line in enumerate(lines):
        draw_text(axes, 0.2, bottom + 0.25 + 0.17 * row, line, 7.5)
    draw_legend(axes, bottom + 0.45 + 0.17 * len(lines), [EQUAL, WRONG, NEVER])
    figure.description = f"First divergence. {difference}."
    return figure


def _look(difference: Divergence, number: int, phase: str) -> Look:
    """Tell whether a phase was equal, wrong, or not reached."""
    here = PHASES.index(phase)
    if difference.phase not in PHASES:  # a round in one call
        return EQUAL if number < difference.round or phase == "prefill" else WRONG
    phase_index = PHASES.index(difference.phase)
    if (number, here) == (difference.round, phase_index):
        return WRONG
    return EQUAL if (number, here) < (difference.round, phase_index) else NEVER
