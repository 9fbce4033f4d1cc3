"""Picture of the keys that each draft step sees, and of the keys that it should see."""

from collections.abc import Collection, Mapping, Sequence

from specsim.core.arguments import check_arguments
from specsim.core.errors import require, require_int
from specsim.plots.sheet import (
    BONUS,
    FAINT,
    FREE,
    ITSELF,
    PREFIX,
    Axes,
    Look,
    Picture,
    draw_cell,
    draw_legend,
    draw_text,
    new_sheet,
)

DRAFT_KEY = Look("seen: draft", "#F3D9E7", "#A2487D")
PREFIX_KEY = Look("seen: committed prefix", PREFIX.face, PREFIX.edge)
OWN_KEY = Look("seen: the step's own", ITSELF.face, ITSELF.edge, ITSELF.width)
EXTRA = Look("seen, but not in the first panel", BONUS.face, BONUS.edge, BONUS.width, dashed=True)
MISSING = Look("not seen, but in the first panel", "#FFFFFF", "#A35F00", 2.0)
UNSEEN = Look("not seen", FREE.face, FREE.edge)
MOST_POSITIONS = 64
_LINE = 0.34


@check_arguments
def keys_seen(panels: Mapping[str, Sequence[Collection[int]]], length: int) -> Picture:
    """Draw the positions whose keys each draft step sees, a panel for each version and a line for each step.

    panels: positions by step, under the version's name. length: tokens of the prefix, so that step i is at position
    length + i. The first panel is what the others are compared with.
    """
    require(bool(panels), "panels", len(panels), "at least one")
    require_int("length", length)
    first = [set(seen) for seen in next(iter(panels.values()))]
    end = length + len(first)
    require(end <= MOST_POSITIONS, "length", length, f"at most {MOST_POSITIONS} positions with the steps")
    for name, steps in panels.items():
        require(len(steps) == len(first), "panels", f"{len(steps)} steps of {name}", f"{len(first)} steps in each")
    cell = min(0.34, 7.6 / end)
    panel_height = 0.45 + _LINE * len(first)
    figure, axes = new_sheet(1.5 + cell * end, 0.85 + panel_height * len(panels) + 0.75)
    draw_text(axes, 0.2, 0.22, "keys that each draft step sees", 9.5, weight="bold")
    for position in range(end):
        draw_text(axes, 1.2 + cell * (position + 0.5), 0.55, str(position), 6.5, FAINT, ha="center")
    draw_text(axes, 0.2, 0.55, "position", 7, FAINT)
    looks = set()
    for panel, (name, steps) in enumerate(panels.items()):
        top = 0.85 + panel_height * panel
        draw_text(axes, 0.2, top, name, 8, weight="bold")
        for step, seen in enumerate(steps):
            y = top + 0.15 + _LINE * step
            draw_text(axes, 0.2, y + _LINE / 2, f"step {step}", 7, FAINT)
            looks |= _line(axes, y, cell, (set(seen), first[step]), (length, length + step, end), f"{name}:{step}")
    order = [look for look in (PREFIX_KEY, DRAFT_KEY, OWN_KEY, EXTRA, MISSING, UNSEEN) if look in looks]
    draw_legend(axes, 0.85 + panel_height * len(panels) + 0.2, order, room=1.5 + cell * end)
    figure.description = " ".join(_in_words(name, steps) for name, steps in panels.items())
    return figure


def _line(
    axes: Axes, y: float, cell: float, keys: tuple[set[int], set[int]], ends: tuple[int, int, int], gid: str
) -> set[Look]:
    """Draw one step; keys: seen, and seen in the first panel. ends: prefix, own position, number of positions."""
    seen, expected = keys
    length, self_position, end = ends
    looks = set()
    for position in range(end):
        if position in seen and position not in expected:
            look = EXTRA
        elif position in expected and position not in seen:
            look = MISSING
        elif position in seen:
            look = OWN_KEY if position == self_position else PREFIX_KEY if position < length else DRAFT_KEY
        else:
            look = UNSEEN
        looks.add(look)
        draw_cell(axes, 1.2 + cell * position, y + 0.03, cell, _LINE - 0.08, look, f"key:{gid}:{position}")
    return looks


def _in_words(name: str, steps: Sequence[Collection[int]]) -> str:
    parts = (f"step {step} sees {_span(seen)}" for step, seen in enumerate(steps))
    return f"{name}: {', '.join(parts)}."


def _span(seen: Collection[int]) -> str:
    """Name a run of positions by its ends, others one by one."""
    ordered = sorted(seen)
    if len(ordered) > 1 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"positions {ordered[0]} to {ordered[-1]}"
    return f"position {', '.join(map(str, ordered))}" if ordered else "no position"
