"""Fits with priors: what cells determine is found, what they do not stays where it was assumed."""

from dataclasses import replace

import numpy as np
import pytest

from specsim.core.errors import InputError
from specsim.simulator.calibration.observation import PRIORS, AssumedAcceptance, candidates
from specsim.simulator.calibration.posterior import DETERMINED, fit, half_widths, measured, predict


def test_known_parameters_are_within_their_intervals(calibrated_cost, grid, known_server):
    found = fit({"": calibrated_cost}, grid)
    assert {"compute", "gap", "draft_step"} <= set(found.determined)
    for name in found.determined:
        low, high = found.interval(name)
        assert low <= known_server().true[name] <= high
        assert high / low < 5
    assert found.discrepancy < 0.035


def test_what_cells_do_not_depend_on_stays_at_its_prior(calibrated_cost, grid):
    found = fit({"": calibrated_cost}, grid)
    for name in ("host", "host_request"):  # hidden behind the device
        assert found.values[name] == pytest.approx(PRIORS[name].value, rel=0.05)
        assert found.deviations[name] > 0.9 * PRIORS[name].spread
        assert name not in found.determined
    assert all(found.deviations[name] <= DETERMINED * PRIORS[name].spread for name in found.determined)


def test_six_cells_predict_the_others(calibrated_cost, grid):
    seen = [cell for cell in grid if cell.batch in (1, 16, 256) and cell.config.num_steps in (0, 6)]
    rest = [cell for cell in grid if cell not in seen]
    found = fit({"": calibrated_cost}, seen)
    errors = np.log(predict({"": calibrated_cost}, rest, found.values) / measured(rest))
    assert len(seen) == 6
    assert np.abs(errors).max() < 0.10
    widths = half_widths({"": calibrated_cost}, rest, found)
    assert (np.abs(errors) <= widths).mean() > 0.8
    assert np.median(widths) < 0.25


def test_a_held_out_figure_does_not_move_the_fit(calibrated_cost, grid):
    found = fit({"": calibrated_cost}, grid[:8])
    wrong = [replace(cell, figures={"decode_tokens_per_s": 9.0}) for cell in grid[8:]]
    assert fit({"": calibrated_cost}, [*grid[:8]]).values == found.values
    assert fit({"": calibrated_cost}, [*grid[:8], *wrong]).values != found.values


def test_unknown_accept_lengths_are_fitted_too(calibrated_cost, grid):
    rate, decay = 0.72, 0.93
    unknown = []
    for cell in grid:
        steps = cell.config.num_steps
        ratio = AssumedAcceptance(rate, decay).length(steps) / cell.accept_length
        figures = {name: value * ratio for name, value in cell.figures.items()}
        unknown.append(replace(cell, accept_length=None if steps else 1.0, figures=figures))
    found = fit({"": calibrated_cost}, unknown)
    assert {"accept_rate", "accept_decay"} <= set(found.names)
    assert found.values["accept_rate"] == pytest.approx(rate, rel=0.05)
    assert "accept_rate" not in candidates({"": calibrated_cost}, grid)


def test_parameters_are_those_that_settings_contain(calibrated_cost, grid):
    plain = [cell for cell in grid if cell.config.is_plain]
    names = candidates({"": calibrated_cost}, plain)
    assert not {"draft_step", "experts", "collective", "filters", "launch", "intake"} & set(names)
    assert "draft_step" in candidates({"": calibrated_cost}, grid)
    assert "collective" in candidates({"": replace(calibrated_cost, tensor_parallel=2)}, plain)
    assert "launch" in candidates({"": replace(calibrated_cost, buckets=())}, plain)
    assert "filters" in candidates({"": calibrated_cost}, [replace(plain[0], filters=True)])


def test_a_fit_without_cells_is_refused(calibrated_cost):
    with pytest.raises(InputError, check=lambda error: error.name == "observations"):
        fit({"": calibrated_cost}, [])
