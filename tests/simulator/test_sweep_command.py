"""Output of specsim sweep, and its file after an interrupt."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from specsim.core.errors import InputError
from specsim.simulator.cell import Cell
from specsim.simulator.sweep import COLUMNS, FIELDS, Results, SweepCounts, cells, key, run_cell, sweep


def rows_of(path) -> dict[str, tuple]:
    if not path.exists():
        return {}
    with sqlite3.connect(path) as file:
        try:
            return {row[0]: row for row in file.execute("select * from cells")}
        except sqlite3.OperationalError:
            return {}


def workers_of(path) -> set[int]:
    return {int(row[COLUMNS.index("worker")].split(":")[1]) for row in rows_of(path).values()}


def test_killed_and_resumed(tmp_path):
    """After kill -9 within a cell, finished cells stay, a second run adds the rest, and no worker survives.

    The fourth cell takes minutes, so the program is always in it when it is killed.
    """
    path, base = tmp_path / "out.sqlite", Cell(output_tokens=100, prompt_tokens=(10, 40), profile="vllm-2026-dense")
    words = ["sweep", "--out", str(path), "--vary", "requests=60,61,62,10000000,63,64", "--output-tokens", "100"]
    words += ["--prompt-tokens", "10-40", "--jobs", "1"]
    process = subprocess.Popen([sys.executable, "-m", "specsim", *words], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while len(rows_of(path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = rows_of(path)
    assert before.keys() == {key(cell) for cell in cells(base, {"requests": [60, 61, 62]})}
    (worker,) = workers_of(path)
    while _lives(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(worker)
    results = Results(path)
    with ThreadPoolExecutor(1) as executor:
        counts = sweep(cells(base, {"requests": [60, 61, 62, 63, 64]}), results, executor)
    results.close()
    assert counts == SweepCounts(simulated=2, stored=3)
    after = rows_of(path)
    assert len(after) == 5
    assert {name: after[name] for name in before} == before


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_a_cluster_gives_what_this_process_gives(command, tmp_path, processes):
    """A real Dask cluster of two workers, threads of this process or processes of their own."""
    distributed = pytest.importorskip("distributed")
    path, words = tmp_path / "out.sqlite", ["--requests", "6", "--prompt-tokens", "20", "--output-tokens", "12"]
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with distributed.LocalCluster(processes=processes, **settings) as cluster:
        address = cluster.scheduler_address
        words += ["--vary", "seed=0,1,2,3,4,5,6,7", "--cluster", address]
        assert command("sweep", "--out", str(path), *words).status == 0
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(path).values()]
    assert len({row["worker"] for row in rows}) == (2 if processes else 1)
    for row in rows[:2]:
        written = {name: json.loads(row[name]) for name in ("shares", "efficiency", "kept")}
        values = {name: row[name] for name in FIELDS} | written
        mine = run_cell(values)
        assert all(mine[name] == row[name] for name in mine if name not in ("seconds", "worker"))


@pytest.mark.parametrize(
    ("delay", "said"), [(None, "the Dask cluster {} has had no worker for 1 s"), (2, "the Dask scheduler {} gives no")]
)
def test_a_cluster_that_is_lost_is_one_sentence(command, tmp_path, monkeypatch, delay, said):
    """A cluster without a worker, and one whose scheduler ends after some seconds."""
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr("specsim.cli.sweep.WORKER_WAIT", 1.0 if delay is None else 600.0)
    settings = {"n_workers": 0, "dashboard_address": ":0", "silence_logs": 50, "processes": False}
    words = ["--out", str(tmp_path / "out.sqlite"), "--vary", "seed=0,1"]
    with distributed.LocalCluster(**settings) as cluster:
        address = cluster.scheduler_address
        if delay is not None:
            threading.Timer(delay, cluster.close).start()
        ended = command("sweep", *words, "--cluster", address)
    assert (ended.status, ended.err.count("\n")) == (3, 1)
    assert ended.err.startswith(f"specsim: {said.format(address)}")
    assert f"; 0 of 2 cells are in {tmp_path}" in ended.err


def test_a_cluster_without_dask_names_its_install_command(command, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "distributed", None)
    words = ["--out", str(tmp_path / "out.sqlite"), "--vary", "seed=1", "--cluster", "tcp://127.0.0.1:1"]
    ended = command("sweep", *words)
    assert ended.refuses("cluster", "tcp://127.0.0.1:1")
    assert "pip install 'specsim[cluster]'" in ended.err


def test_rates_of_acceptance_are_shown_as_they_were_given(command, tmp_path):
    load = ["--requests", "1", "--prompt-tokens", "9", "--output-tokens", "9", "--jobs", "1"]
    words = ["--out", str(tmp_path / "out.sqlite"), "--vary", "accept_rate=0.25,0.75"]
    lines = [line.split() for line in command("sweep", *words, *load).out.splitlines()]
    assert any(words[:1] == ["accept_rate"] for words in lines)
    assert [words[0] for words in lines if len(words) == 4] == ["0.25", "0.75"]


def test_requests_of_one_token_have_no_tpot_to_show(command, tmp_path):
    load = ["--requests", "2", "--prompt-tokens", "9", "--output-tokens", "1", "--jobs", "1"]
    out, json_file = (str(tmp_path / name) for name in ("out.sqlite", "cells.json"))
    words = ["--out", out, "--vary", "num_steps=0,2", "--json", json_file]
    lines = [line.split() for line in command("sweep", *words, *load).out.splitlines()]
    assert sorted(words[0] for words in lines if words[-1:] == ["-"]) == ["0", "2"]
    assert [cell["Mean TPOT (ms)"] for cell in json.loads(Path(json_file).read_text())["cells"]] == [None, None]


def test_every_load_has_its_best_setting(command, tmp_path):
    load = ["--requests", "8", "--prompt-tokens", "20", "--output-tokens", "12", "--jobs", "1"]
    out, json_file = (str(tmp_path / name) for name in ("out.sqlite", "cells.json"))
    words = ["--out", out, "--json", json_file, "--vary", "num_steps=0,2,3", "--vary", "concurrency=1,4"]
    ended = command("sweep", *words, "--vary", "seed=0,1", *load)
    said = " ".join(ended.out.split())
    assert "The best setting of each of 2 loads. Simulated, not measured, means over seeds" in said
    assert "assumed, as published for Llama-3.1-8B with EAGLE-3" in said
    lines = [line.split() for line in ended.out.splitlines()]
    table = lines[[words[:2] for words in lines].index(["concurrency", "num_steps"]) + 1 :][:2]
    value = json.loads(Path(json_file).read_text())
    assert len(value["cells"]) == 12
    for words, best in zip(table, value["best"], strict=True):
        assert words[:2] == [str(best["concurrency"]), str(best["num_steps"])]
        speeds = [
            np.mean(
                [
                    cell["Output Throughput (tok/s)"]
                    for cell in value["cells"]
                    if (cell["concurrency"], cell["num_steps"]) == (best["concurrency"], steps)
                ]
            )
            for steps in (0, 2, 3)
        ]
        assert best["Output Throughput (tok/s)"] == pytest.approx(speeds[(0, 2, 3).index(best["num_steps"])])
        assert best["Output Throughput (tok/s)"] >= 0.99 * max(speeds)
    assert [words[0] for words in table] == ["1", "4"]


def test_a_single_load_has_its_settings_ranked(command, tmp_path):
    load = ["--requests", "4", "--prompt-tokens", "20", "--output-tokens", "12", "--jobs", "1"]
    ended = command("sweep", "--out", str(tmp_path / "out.sqlite"), "--vary", "num_steps=0,1,2", *load)
    lines = [line.split() for line in ended.out.splitlines()]
    speeds = [float(words[1].replace(",", "")) for words in lines if words and words[0] in "012"]
    assert len(speeds) == 3
    assert speeds[0] > speeds[2]
    assert "The best 3 of 3 settings." in ended.out


def test_an_interrupt_is_one_line_and_keeps_what_is_written(tmp_path):
    """Ctrl-C reaches this program and its workers, which are in the middle of cells that would take minutes."""
    path = tmp_path / "out.sqlite"
    words = ["sweep", "--out", str(path), "--vary", "requests=60,61,62,10000000,10000001,63", "--jobs", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "specsim", *words, "--output-tokens", "100", "--prompt-tokens", "10-40"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while len(rows_of(path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = workers_of(path)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == f"specsim: interrupted; {len(rows_of(path))} of 6 cells are in {path}\n"
    assert len(rows_of(path)) >= 3
    assert not any(map(_lives, workers))


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--vary", "seed"], "vary", "seed"),
        (["--vary", "seed=a"], "seed", "a"),
        (["--vary", "rate=1,fast"], "rate", "fast"),
        (["--vary", "model=3"], "model", 3),
        (["--vary", "chunk_tokens=true"], "chunk_tokens", True),
        (["--vary", "colour=1"], "vary", "colour"),
        (["--vary", "rate=1,NaN"], "rate", float("nan")),
        (["--vary", f"rate=1{'0' * 400}"], "rate", 10**400),
        (["--vary", "accept_rate=2"], "vary", "accept_rate=2"),
        (["--vary", "accept_rate=true"], "vary", "accept_rate=true"),
        (["--vary", "shares=0.5"], "vary", "shares"),
        (["--vary", "concurrency=1,2", "--hardware", "typo"], "hardware", "typo"),
        (["--vary", "concurrency=1,2", "--model", "typo"], "model", "typo"),
        (["--vary", "concurrency=1,2", "--requests", "-8"], "requests", -8),
        (["--vary", "concurrency=1,2", "--prefill", "never"], "prefill", "never"),
        (["--vary", "num_steps=9,10"], "num_steps", 9),
        (["--vary", "num_steps=1,1,1"], "vary", "num_steps=1,1,1"),
        (["--vary", "rate=8,2,8.0"], "vary", "rate=8,2,8.0"),
        (["--vary", "prompt_tokens=20,20-20"], "vary", "prompt_tokens=20,20-20"),
        (["--vary", "accept_rate=0.5,0.50"], "vary", "accept_rate=0.5,0.50"),
        (["--vary", "efficiency=1"], "vary", "efficiency"),
        (["--vary", "seed=1", "--efficiency", "speed=1"], "efficiency", "speed=1"),
        (["--vary", "seed=1", "--plain-schedule", "never"], "plain_schedule", "never"),
        (["--vary", "seed=1", "--rate", "3", "--concurrency", "5"], "rate", 3.0),
        (["--vary", "rate=1,2", "--concurrency", "5"], "rate", "[1, 2]"),
        (["--vary", "concurrency=1,2", "--rate", "3"], "rate", 3.0),
        (["--vary", "seed=1,2", "--vary", "seed=4"], "vary", "seed=4"),
        (["--vary", "accept_rate=0", "--vary", "accept_rate=1"], "vary", "accept_rate=1"),
        (["--vary", "seed=1", "--jobs", "0"], "jobs", 0),
        (["--vary", "seed=1", "--jobs", "2", "--cluster", "tcp://127.0.0.1:1"], "jobs", 2),
    ],
)
def test_bad_input_is_one_sentence(command, tmp_path, words, name, value):
    assert command("sweep", "--out", str(tmp_path / "out.sqlite"), *words).refuses(name, value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_the_finished_cells(tmp_path):
    """The file may have few pages more than it has, as on a disk that fills while a sweep runs."""
    results = Results(tmp_path / "out.sqlite")
    grid = cells(Cell(prompt_tokens=(10, 40), output_tokens=10), {"requests": list(range(1, 30))})
    (pages,) = results._file.execute("pragma page_count").fetchone()
    results._file.execute(f"pragma max_page_count = {pages + 3}")
    with ThreadPoolExecutor(1) as executor, pytest.raises(InputError, check=lambda error: error.name == "out"):
        sweep(grid, results, executor)
    results.close()
    rows = rows_of(tmp_path / "out.sqlite")
    assert 0 < len(rows) < len(grid)
    assert rows.keys() < {key(cell) for cell in grid}
