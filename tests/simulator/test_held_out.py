"""Held-out errors of published tables, which no calibration has seen."""

from dataclasses import replace

import numpy as np
import pytest

from specsim.simulator.calibration.held_out import closed_formula, leave_one_table_out, six_cells, speeds
from specsim.simulator.calibration.observation import PRIORS, candidates
from specsim.simulator.calibration.posterior import Posterior
from specsim.simulator.calibration.profile import profile
from specsim.simulator.calibration.published import CELLS, tables
from specsim.simulator.calibration.published_report import (
    COVERAGE,
    MEAN_REGRET,
    MOST_REGRET,
    MOST_WIDTH,
    PublishedReport,
    regrets,
)
from specsim.simulator.calibration.structure import Calibrated

TABLES = {table.name: table for table in tables()}
QUICK = ("vllm_41162, Llama3 8B", "vllm_41162, Qwen3 8B", "fast_rounds", "sglang_22246")


@pytest.fixture(scope="module")
def six():
    return {name: six_cells(TABLES[name]) for name in QUICK}


@pytest.mark.parametrize("name", QUICK)
def test_six_cells_predict_the_rest_of_a_table(six, name):
    found = six[name]
    assert len(found.seen) == CELLS
    assert found.is_within_target is True
    assert not found.is_doubted
    assert found.formula_errors.mean() > 3 * found.errors.mean()


def test_bands_hold_the_promised_share(six):
    left = leave_one_table_out([TABLES[name] for name in QUICK[:2]])
    assert [each.result.errors.mean() < 0.12 for each in left] == [True, True]
    covered, width = PublishedReport([], list(six.values()), left, []).bands
    assert COVERAGE[0] <= covered <= COVERAGE[1]
    assert width <= MOST_WIDTH


def test_speedups_are_those_of_the_table_at_equal_batches(six):
    """No two seen cells; over 1 step, as the table has no plain decoding."""
    found = six["sglang_22246"].speedups
    cells = {cell.label: cell.figures["decode_tokens_per_s"] for cell in TABLES["sglang_22246"].cells}
    assert len(found.labels) == 7 * 5 - 3
    for label, measured in zip(found.labels, found.measured, strict=True):
        after, before = label.split(" over ")
        assert before == f"1 steps, {after.split(', ')[1]}"
        assert measured == pytest.approx(cells[after] / cells[before])
    assert (found.covered == (np.abs(np.log(found.predicted / found.measured)) <= found.widths)).all()
    rounds = six["fast_rounds"].speedups  # of seconds, so inverse
    assert rounds.measured.max() < 1
    assert rounds.errors.mean() < 0.04
    assert len(six["vllm_41162, Llama3 8B"].speedups.labels) == 0


def test_one_server_explains_both_heads():
    """EAGLE-1's rounds follow from EAGLE-3's, as launches of their heads are counted."""
    pair = [TABLES[f"vllm_20780, {head}"] for head in ("eagle1", "eagle3")]
    first, _ = (each.result for each in leave_one_table_out(pair))
    assert first.errors.mean() < 0.12
    assert first.errors.max() < 0.30
    assert first.speedups.covered.all()
    kept = profile("vllm-2025-dense")
    assert kept.structure.graphs == "target"
    assert kept.provenance["doubts"] == []
    assert kept.posterior.discrepancy < 0.05


def test_errors_before_calibration_are_of_assumed_parameters(six):
    for found in six.values():
        assert found.errors_before.mean() > 3 * found.errors.mean()


def test_cells_are_selected_by_their_settings_alone():
    for table in TABLES.values():
        other = [replace(cell, figures=dict.fromkeys(cell.figures, 1.0)) for cell in table.cells]
        assert replace(table, cells=other).seen == table.seen
    seen = [TABLES["sglang_22246"].cells[at] for at in TABLES["sglang_22246"].seen]
    places = {(cell.batch, cell.config.num_steps) for cell in seen}
    assert places == {(batch, steps) for batch in (1, 8, 64) for steps in (1, 6)}


@pytest.mark.parametrize("name", TABLES)
def test_every_cell_is_either_fitted_or_held_out(name):
    """So is every speed-up, unless both sides were fitted; parameters are those before any calibration."""
    table = TABLES[name]
    structure = table.structures[0]
    costs = structure.costs(table.costs)
    names = candidates(costs, table.cells)
    logs = np.log([PRIORS[parameter].value for parameter in names])
    result = six_cells(table, Calibrated(costs, structure, Posterior(names, logs, np.eye(len(names)), 0.03), {}))
    seen = [table.cells[index] for index in table.seen]
    rest = [cell for cell in table.cells if not any(cell is other for other in seen)]
    assert (len(seen), result.seen) == (min(CELLS, len(table.cells)), tuple(cell.label for cell in seen))
    figures = [(f"{cell.label}, {figure}", value) for cell in speeds(rest) for figure, value in cell.figures.items()]
    assert list(zip(result.labels, result.measured, strict=True)) == figures
    pairs = [label.split(" over ") for label in result.speedups.labels]
    assert not any(len(pair) == 2 and {*pair} <= {*result.seen} for pair in pairs)
    assert [pair for pair in pairs if len(pair) == 1] == [[cell.label] for cell in rest if "speedup" in cell.figures]


def test_the_choice_of_steps_follows_the_batch():
    found = regrets(TABLES["sglang_22246"])
    losses = np.array([each.simulated for each in found])
    assert len(losses) == 7
    assert losses.mean() <= MEAN_REGRET
    assert losses.max() <= MOST_REGRET
    assert losses.mean() < np.mean([each.always for each in found]) < np.mean([each.formula for each in found])


def test_the_closed_formula_ignores_the_batch():
    table = TABLES["sglang_22246"]
    cells = [cell for cell in table.cells if cell.config.num_steps == 3]
    found = closed_formula(table.costs, {"accept_rate": 0.7, "accept_decay": 1.0}, cells, cells)
    per_request = found / [cell.batch for cell in cells]
    assert np.ptp(per_request) == pytest.approx(0, abs=1e-9)


def test_a_table_of_no_server_is_doubted():
    assert six_cells(TABLES["angelslim_163"]).is_doubted
