"""Runs of suites: rows in order, exit statuses, bad options."""

import json
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

import specsim.bench.clock
import specsim.bench.scene
import specsim.bench.session as run
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing
from specsim.bench.session import bench
from specsim.bench.suites import Options, Suite
from specsim.cli.main import main
from specsim.core.errors import InputError
from specsim.maintain import results as kept_results

PEAKS = Peaks(read=1e12, copy=1e12, dense=1e12)
PASSED, FAILED = Check("numbers", 0.0, 0), Check("numbers", 1.0, 0, "entry 3: 1, not 2")
BOUND = RooflineBound((TensorBytes("weight", 4_000_000),), 1_000_000)  # 4 us


@pytest.mark.parametrize("suite", run.SUITES)
def test_the_groups_of_a_suite_are_found(suite):
    for group in run.SUITES[suite].groups.values():
        group(Options(suite), PEAKS).close()  # nothing runs before the first row is requested


TARGETS = (PerformanceTarget("time / roofline bound", 1.25, 1.3),)
VERSIONS = {"python": "3", "specsim": "1", "torch": "2", "triton": "3", "gpu": "a GPU"}
ROWS = (
    BenchRow("linear", {"rows": 8}, {OURS: PASSED}, {OURS: Timing(5.0, 1.0, 9)}, BOUND, 4.0, TARGETS),
    BenchRow("linear", {"rows": 64}, {OURS: PASSED, "library": PASSED}, {"library": Timing(9.0, 1.0, 9)}, BOUND, 4.0),
)


@pytest.fixture
def suite(monkeypatch):
    """A suite of made-up rows that needs no GPU."""

    def install(*rows: BenchRow) -> None:
        suites = {"kernels": Suite({"some": lambda options, peaks: iter(rows)}, 60)}
        monkeypatch.setattr("specsim.bench.session.SUITES", suites)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(run, "versions", lambda device, only_imported: VERSIONS)
        monkeypatch.setattr(specsim.bench.clock, "measure_peaks", lambda: PEAKS)

    return install


def test_a_run_is_shown_and_written(suite, tmp_path, capsys):
    suite(*ROWS)
    file = tmp_path / "result.json"
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--suite", "kernels", "--json", str(file)])
    assert exit_.value.code == 0
    value = json.loads(file.read_text())
    assert value["command"] == "specsim bench --suite kernels"
    assert value["is_complete"]
    assert value["rows"][0]["roofline_bound"]["parts"] == [{"tensor": "weight", "count": 1, "bytes": 4_000_000}]
    assert value["rows"][0]["time_over_bound"] == 1.25
    assert value["rows"][1]["time_over_bound"] is None
    out = capsys.readouterr().out
    assert "linear: rows 8" in out
    assert "Every equality check passed; 1 of 1 targets are reached." in " ".join(out.split())
    assert "4,000,000 bytes" in out


def test_a_failed_check_is_exit_status_1(suite, capsys):
    suite(ROWS[0], BenchRow("linear", {"rows": 1}, {OURS: FAILED}))
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--suite", "kernels"])
    assert exit_.value.code == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "NOT EQUAL, so no time: numbers: entry 3: 1, not 2" in out
    assert "NOT EQUAL in 1 of 2 rows" in out


def test_a_run_that_a_time_limit_ends_is_incomplete(suite):
    suite(*ROWS)
    grouped = tuple(replace(row, group="some") for row in ROWS)
    result = bench(Options("kernels", seconds=1e-9))
    assert (result.rows, result.finished, result.is_complete) == (grouped[:1], (), False)
    whole = bench(Options("kernels"))
    assert (whole.rows, whole.finished, whole.is_complete) == (grouped, ("some",), True)
    assert not bench(Options("kernels", quick=True)).is_complete


def test_rows_that_were_measured_together_are_all_kept(suite, monkeypatch):
    suite()
    groups = {"some": lambda *given: iter([ROWS]), "others": lambda *given: iter(ROWS)}
    monkeypatch.setattr(run, "SUITES", {"kernels": Suite(groups, 60)})
    result = bench(Options("kernels", seconds=1e-9))
    assert [(row.setting, row.group) for row in result.rows] == [(row.setting, "some") for row in ROWS]
    assert (result.finished, result.unfinished, result.is_complete) == (("some",), 0, False)


def test_rows_of_an_incomplete_group_are_not_kept(suite, tmp_path, monkeypatch):
    suite()
    groups = {"some": lambda *given: iter(ROWS[:1]), "others": lambda *given: iter(ROWS[::-1])}
    for module in (run, kept_results):
        monkeypatch.setattr(module, "SUITES", {"kernels": Suite(groups, 60)})
    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=count().__next__))
    files = [tmp_path / "cut.json", tmp_path / "others.json"]
    cut = bench(Options("kernels", seconds=3), "specsim bench", files[0])
    assert (cut.finished, cut.unfinished) == (("some",), 1)
    assert [(row.setting, row.group) for row in cut.rows] == [(ROWS[0].setting, "some"), (ROWS[1].setting, "others")]
    assert bench(Options("kernels", only="others"), "specsim bench", files[1]).unfinished == 0
    (path,) = kept_results.keep(files, tmp_path)
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["setting"] for row in rows] == [each.setting for each in (ROWS[0], *ROWS[::-1])]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_sentence_and_exit_status_2(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--suite", "round"])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("specsim: device is 'cpu'; allowed: a GPU that CUDA can use")


BAD = {"suite": "all", "only": "x", "seconds": 0, "shape": "llama-9"}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_named(name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        run.check_options(replace(Options("round"), **{name: BAD[name]}))
