"""Settings that a plan compares, and the limits of the list."""

import pytest

from specsim import SpecConfig
from specsim.simulator.candidates import candidates, limits_reached, takes_trees
from specsim.simulator.cell import Cell

CHAINS = [(1, steps, steps + 1) for steps in range(1, 9)]
NARROW = [(2, 2, 4), (2, 3, 8), (2, 5, 8), (2, 5, 16)]
MIDDLE = [(3, 4, 8), (3, 4, 16), (4, 3, 8), (4, 3, 16), (4, 3, 32), (4, 5, 8), (4, 5, 16), (4, 5, 32), (4, 5, 64)]
WIDE = [(8, 3, 8), (8, 3, 16), (8, 3, 32), (8, 3, 64), (8, 5, 8), (8, 5, 16), (8, 5, 32), (8, 5, 64)]


def shares(depth: int, width: int) -> tuple[tuple[float, ...], ...]:
    return ((0.1,) * width,) * depth


def trees(cell: Cell) -> list[tuple[int, int, int]]:
    configs = candidates(cell)
    assert configs[0] == SpecConfig.plain(cell.page_size)
    assert {config.page_size for config in configs} == {cell.page_size}
    return [(config.topk, config.num_steps, config.num_draft_tokens) for config in configs[1:]]


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (Cell(), CHAINS + NARROW + MIDDLE),
        (Cell(page_size=1), CHAINS + NARROW + MIDDLE),
        (Cell(shares=shares(6, 8)), CHAINS[:6] + NARROW + MIDDLE + WIDE),
        (Cell(shares=shares(4, 7)), CHAINS[:4] + NARROW[:2] + MIDDLE[:5]),
        (Cell(shares=shares(3, 2)), CHAINS[:3] + NARROW[:2]),
        (Cell(shares=shares(8, 1)), CHAINS),
        (Cell(shares=((0.5, 0.2), (0.5,))), CHAINS[:2]),
        (Cell(model="glm-4.7-flash"), CHAINS),
        (Cell(model="glm-4.7-flash", page_size=1), CHAINS + NARROW + MIDDLE),
    ],
)
def test_exactly_these_settings_are_tried(cell, expected):
    assert trees(cell) == expected
    assert takes_trees(cell) == (cell.model != "glm-4.7-flash" or cell.page_size == 1)


@pytest.mark.parametrize(
    ("best", "limits"),
    [
        (SpecConfig.plain(), {}),
        (SpecConfig(1, 7, 8), {}),
        (SpecConfig(1, 8, 9), {"num_steps": 8}),
        (SpecConfig(3, 4, 16), {}),
        (SpecConfig(4, 3, 8), {"topk": 4}),
        (SpecConfig(2, 5, 16), {"num_steps": 5}),
        (SpecConfig(4, 5, 64), {"topk": 4, "num_steps": 5, "num_draft_tokens": 64}),
    ],
)
def test_what_no_tried_setting_exceeds_is_named(best, limits):
    assert limits_reached(best, candidates(Cell())) == limits
