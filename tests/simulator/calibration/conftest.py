"""A server whose parameters are known, and its cells as a benchmark would measure them."""

from dataclasses import replace

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.simulator import CostModel, drafter, hardware, model
from specsim.simulator.calibration.observation import Acceptance, FrontEnd, Observation
from specsim.simulator.calibration.parameters import Parameters

TRUE = {"bandwidth": 0.7, "compute": 0.35, "overlap": 0.6, "gap": 8e-6, "draft_step": 1.5e-4}
LENGTHS = {0: 1.0, 1: 1.7, 3: 2.5, 6: 3.1}  # accept lengths by steps


def measured(cost, cell, quantity, rng, noise=0.01, values=TRUE):
    """The cell with the figure that a server with these parameters gives, and noise."""
    parameters = Parameters.of(values)
    own = parameters.cost(cost if cell.config.num_steps else replace(cost, drafter=None), False)
    asked = replace(cell, figures={quantity: 1.0})
    (figure,) = asked.predict(own, FrontEnd(), Acceptance()).values()
    return replace(cell, figures={quantity: figure * float(np.exp(noise * rng.standard_normal()))})


def cell_of(batch, steps, quantity="decode_tokens_per_s"):
    config = SpecConfig(1, steps, steps + 1) if steps else SpecConfig.plain()
    label = f"{steps} steps, batch {batch}"
    return Observation(label, config, batch, LENGTHS[steps], 512, 256, {quantity: 1.0})


@pytest.fixture(scope="session")
def cost():
    target = model("llama-3.1-8b")
    return CostModel(hardware("H100-SXM"), target, drafter("eagle3", target, 32000))


@pytest.fixture(scope="session")
def grid(cost):
    """Cells of a grid of batch sizes and steps."""
    rng = np.random.default_rng(0)
    places = [(batch, steps) for batch in (1, 4, 16, 64, 256) for steps in LENGTHS]
    return [measured(cost, cell_of(*place), "decode_tokens_per_s", rng) for place in places]
