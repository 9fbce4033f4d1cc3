"""Fits with priors: what cells determine is found, what they do not stays where it was assumed."""

from dataclasses import replace

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.calibration.observation import PRIORS, AssumedAcceptance, Observation, candidates
from specsim.simulator.calibration.posterior import DETERMINED, Posterior, fit, half_widths, measured, predict


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


def test_the_error_of_a_prediction_is_that_of_fits_to_the_others(calibrated_cost, grid):
    """The discrepancy is the root mean square error of each cell under a fit to the others."""
    rng, costs = np.random.default_rng(4), {"": calibrated_cost}
    rough = [
        replace(
            cell, figures={name: value * np.exp(0.15 * rng.standard_normal()) for name, value in cell.figures.items()}
        )
        for cell in grid[::3]
    ]
    errors = []
    for cell in rough:
        others = fit(costs, [other for other in rough if other is not cell])
        errors += np.log(predict(costs, [cell], others.values) / measured([cell])).tolist()
    assert fit(costs, rough).discrepancy == pytest.approx(np.sqrt(np.mean(np.square(errors))), rel=0.1)


@pytest.mark.parametrize("name", PRIORS)
def test_every_parameter_moves_a_figure_of_a_used_cost_model(name):
    """Cost models with what they computed under other parameters predict as fresh ones do."""
    targets = [model("gpt-oss-20b"), model("glm-4.7-flash")]
    costs = {
        target.name: CostModel(hardware("B200"), target, drafter("eagle3", target), tensor_parallel=2, schedule="sync")
        for target in targets
    }
    figures = dict.fromkeys(("tokens_per_s", "tpot_s", "ttft_s", "round_s"), 1.0)
    cells = [
        Observation("a cell", SpecConfig(1, 3, 4), 16, None, 500, 100, figures, filters=True, source=source)
        for source in costs
    ]
    models: dict = {}
    before = predict(costs, cells, {}, models)
    value = {name: PRIORS[name].value / 1.25}
    after = predict(costs, cells, value, models)
    assert after.tolist() == predict(costs, cells, value).tolist()
    assert after.tolist() != before.tolist()
    assert name in candidates(costs, cells)


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


def test_bounds_that_good_servers_reach_are_no_bounds():
    names = ("overlap", "bandwidth", "host")
    for bound, at_bounds in (("least", names), ("most", names[1:]), ("value", ())):
        logs = np.log([getattr(PRIORS[name], bound) for name in names])
        assert Posterior(names, logs, np.eye(3), 0.03).at_bounds == at_bounds


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
