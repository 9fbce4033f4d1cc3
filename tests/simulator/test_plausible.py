"""Doubts are said where another GPU, or no server at all, would explain the cells."""

from dataclasses import replace

import numpy as np

from specsim.simulator import hardware
from specsim.simulator.calibration.benchmark_file import Context
from specsim.simulator.calibration.posterior import fit, measured, predict
from specsim.simulator.calibration.published import tables
from specsim.simulator.calibration.structure import calibrate, doubts, is_of_another_gpu


def doubted(cost, cells, left_out=None):
    found = fit({"": cost}, cells)
    errors = predict({"": cost}, cells, found.values) / measured(cells) - 1
    return doubts(found, errors, left_out or {})


def test_a_sound_calibration_has_no_doubts(calibrated_cost, grid):
    assert doubted(calibrated_cost, grid) == []


def test_the_wrong_gpu_is_noticed():
    """The published table of an H20 looks like a twelfth of an H100's arithmetic."""
    (table,) = (each for each in tables() if each.name == "sglang_22246")
    own = {name: replace(cost, hardware=hardware("H100-SXM")) for name, cost in table.costs.items()}
    found = calibrate(own, table.cells[::5])
    errors = found.predict(table.cells[::5]) / measured(table.cells[::5]) - 1
    assert any(
        "of a GPU's arithmetic: probably another GPU or setting" in each for each in doubts(found.posterior, errors, {})
    )
    right = calibrate(table.costs, table.cells[::5])
    errors = right.predict(table.cells[::5]) / measured(table.cells[::5]) - 1
    assert not any("arithmetic" in each for each in doubts(right.posterior, errors, {}))


def test_cells_of_no_server_are_noticed(calibrated_cost, grid):
    first = replace(grid[0], figures={name: 3 * value for name, value in grid[0].figures.items()})
    assert any("no server explains all cells" in each for each in doubted(calibrated_cost, [first, *grid[1:]]))


def test_far_extrapolation_is_noticed(calibrated_cost, grid):
    assert any("do not extrapolate" in each for each in doubted(calibrated_cost, grid, {64: np.array([0.1, -0.5])}))
    assert doubted(calibrated_cost, grid, {64: np.array([0.1])}) == []


def test_a_context_keeps_what_a_file_does_not_say():
    given = Context(num_steps=5, topk=4, num_draft_tokens=8)
    assert given.with_setting(None) is given
    assert given.with_setting(2).config("file").num_draft_tokens == 3
    assert given.config("file").num_draft_tokens == 8


def test_a_share_that_no_gpu_has_is_told_from_slow_hosts(known_server, grid):
    posterior = fit({"": known_server().cost}, grid)
    assert not is_of_another_gpu(posterior)
    slow = replace(posterior, logs=posterior.logs + 5 * np.array([name == "host" for name in posterior.names]))
    assert not is_of_another_gpu(slow)
    wrong = replace(posterior, logs=posterior.logs - 3 * np.array([name == "compute" for name in posterior.names]))
    assert is_of_another_gpu(wrong)
