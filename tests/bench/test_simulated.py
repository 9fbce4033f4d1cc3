"""The suite of the simulator, which needs no GPU: checks before times."""

import json

import numpy as np
import pytest

from specsim.bench import simulated
from specsim.bench.row import OURS
from specsim.cli.main import main


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(simulated, "REQUESTS", 20)
    monkeypatch.setattr(simulated, "SAMPLES", 1)


def test_the_loop_is_timed_after_its_check(few):
    rows = list(simulated.loop_rows(is_quick=False))
    assert [row.setting["rate"] for row in rows] == list(simulated.RATES)
    for row in rows:
        assert row.passed
        assert row.timings[OURS].samples == 1
        assert row.targets[0].value == pytest.approx(row.ours_us / 1e6)
        assert "us a step" in row.notes[0]


def test_a_loop_with_other_results_has_no_time(few, monkeypatch):
    def differing(cost, *arguments):
        run = real(cost, *arguments)
        return _shifted(run) if isinstance(cost, simulated.ForgetfulCost) else run

    real = simulated.simulate
    monkeypatch.setattr(simulated, "simulate", differing)
    (row,) = simulated.loop_rows(is_quick=True)
    assert not row.passed
    assert row.checks[OURS].difference == "lasts differs"
    assert not row.timings


def _shifted(run):
    run.lasts[3] = np.nextafter(run.lasts[3], np.inf)
    return run


def test_the_scheduler_has_the_same_steps(few):
    rows = list(simulated.scheduler_rows())
    assert [row.setting["schedule"] for row in rows] == ["sync", "overlap"]
    assert all(row.passed for row in rows)
    assert all(" 0 preemptions" not in row.notes[0] for row in rows)


def test_the_command_runs_without_a_gpu(few, tmp_path):
    file = tmp_path / "simulator.json"
    with pytest.raises(SystemExit) as end:
        main(["bench", "--suite", "simulator", "--quick", "--only", "loop", "--json", str(file)])
    assert end.value.code == 0
    value = json.loads(file.read_text())
    assert value["measured_peaks"] is None
    assert [row["name"] for row in value["rows"]] == ["event loop"]
