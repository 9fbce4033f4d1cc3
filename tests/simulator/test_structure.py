"""Structures of a server are found where cells speak for them."""

from dataclasses import replace

import numpy as np
import pytest

from specsim.simulator import model
from specsim.simulator.calibration.posterior import measured
from specsim.simulator.calibration.profile import ServerStructure, merged
from specsim.simulator.calibration.structure import STRUCTURES, calibrate, left_out


@pytest.mark.parametrize(
    ("true", "values"),
    [
        (ServerStructure(), {}),
        (ServerStructure("sync", plain_schedule="overlap"), {"host": 4e-3}),
        (ServerStructure("sync", "target"), {"launch": 1.5e-4}),
    ],
)
def test_the_structure_that_made_the_cells_is_found(calibrated_cost, known_server, true, values):
    rng = np.random.default_rng(1)
    own = true.costs({"": calibrated_cost})
    cells = []
    for batch in (1, 8, 64):
        for steps in (0, 1, 3, 6):
            server = own.get(" without drafts", own[""]) if not steps else own[""]
            cells.append(known_server(server, **values).cell(batch, steps, rng, 0.005))
    found = calibrate({"": calibrated_cost}, cells)
    assert found.structure == true
    assert set(found.tried) == set(STRUCTURES)


def test_without_evidence_the_first_structure_is_taken(calibrated_cost, grid):
    one = [cell for cell in grid if cell.batch == 64][:2]
    assert calibrate({"": calibrated_cost}, one).structure == STRUCTURES[0]


def test_each_batch_is_predicted_from_the_others(calibrated_cost, grid):
    errors = left_out({"": calibrated_cost}, grid)
    assert list(errors) == [1, 4, 16, 64, 256]
    assert max(np.abs(errors[size]).max() for size in (4, 16, 64)) < 0.10
    wrong = [replace(cell, figures={"decode_tokens_per_s": 1.0}) if cell.batch == 16 else cell for cell in grid]
    predicted = (1 + errors[16]) * measured([cell for cell in grid if cell.batch == 16])
    assert 1 + left_out({"": calibrated_cost}, wrong)[16] == pytest.approx(predicted)  # whatever was measured there
    assert left_out({"": calibrated_cost}, grid[:4]) == {}


def test_equal_layers_are_joined_wherever_they_are():
    layers = model("gpt-oss-20b").layers
    joined = merged(layers)
    assert len(layers) == 24
    assert [group.count for group in joined] == [12, 12]
    assert sum(group.count * group.weights for group in joined) == sum(group.count * group.weights for group in layers)
