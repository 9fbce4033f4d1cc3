"""Loads to measure are chosen by what they can tell about all others."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.calibration.observation import PRIORS, Observation
from specsim.simulator.calibration.posterior import fit, most_informative, predict

LLAMA = model("llama-3-8b")
COSTS = {"": CostModel(hardware("H100-SXM"), LLAMA, drafter("eagle3", LLAMA, 32000), schedule="sync")}
NAMES = ("bandwidth", "compute", "overlap", "host")
FIGURES = {"tpot_s": 1.0, "ttft_s": 1.0}


def load(batch: int, steps: int) -> Observation:
    config = SpecConfig(1, steps, steps + 1) if steps else SpecConfig.plain()
    return Observation(f"{batch}, {steps}", config, batch, 2.2 if steps else 1.0, 512, 256, FIGURES)


LOADS = [load(1, 0), load(2, 0), load(64, 0), load(512, 0), load(1, 3), load(256, 3)]


def as_predicted(loads: list[Observation]) -> list[Observation]:
    """Give loads the figures that they have at the priors."""
    values = {name: PRIORS[name].value for name in NAMES}
    found = predict(COSTS, loads, values).reshape(len(loads), -1)
    return [
        replace(each, figures=dict(zip(FIGURES, own, strict=True)))
        for each, own in zip(loads, found.tolist(), strict=True)
    ]


def largest_deviation(fitted: list[Observation], loads: list[Observation]) -> float:
    """Fit some loads, and compute the largest deviation of a TPOT by drawing parameters from the posterior."""
    posterior = fit(COSTS, fitted, NAMES)
    draws = np.random.default_rng(0).multivariate_normal(posterior.logs, posterior.covariance * 0.05**2, 200)
    found = [predict(COSTS, loads, dict(zip(NAMES, np.exp(draw), strict=True)))[::2] for draw in draws]
    return float(np.log(found).std(axis=0).max() / 0.05)


def test_no_other_choice_leaves_less_uncertainty():
    loads = as_predicted(LOADS)
    chosen = most_informative(COSTS, loads, 2, NAMES)
    best = largest_deviation(list(chosen), loads)
    assert all(best <= 1.1 * largest_deviation(list(pair), loads) for pair in combinations(loads, 2))
    worse = [pair for pair in combinations(loads, 2) if largest_deviation(list(pair), loads) > 1.5 * best]
    assert worse


def test_measured_figures_do_not_matter():
    labels = [
        [each.label for each in most_informative(COSTS, loads, 3, NAMES)] for loads in (LOADS, as_predicted(LOADS))
    ]
    assert labels[0] == labels[1]


@pytest.mark.parametrize("count", [0, 7, -1])
def test_a_count_that_allows_no_choice_is_refused(count):
    with pytest.raises(InputError, match="allowed: 1 to 6"):
        most_informative(COSTS, LOADS, count, NAMES)


def test_too_many_choices_are_refused():
    with pytest.raises(InputError, match="at most 100,000 choices; these are 6,540,715,896"):
        most_informative(COSTS, LOADS * 8, 10, NAMES)


@pytest.mark.parametrize("name", ["tpot_s", "itl_s"])
def test_a_time_between_tokens_needs_two_of_them(name):
    with pytest.raises(InputError, match=f"output_tokens is 1; allowed: at least 2 where {name} was measured"):
        Observation("cell", SpecConfig.plain(), 4, 1.0, 512, 1, {name: 0.01})
