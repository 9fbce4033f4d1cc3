"""Sweeps: every cell is written, none is run twice, none is lost, under any executor."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from specsim.core.errors import InputError
from specsim.simulator.cell import Cell
from specsim.simulator.model import read_config
from specsim.simulator.sweep import COLUMNS, FIELDS, Counts, Results, cells, key, run_cell, sweep

BASE = Cell(requests=6, concurrency=2, prompt_tokens=(10, 40), output_tokens=12)
VARY = {"num_steps": [0, 1, 3, 9], "concurrency": [1, 4], "seed": [0, 1, 2]}


class Counting(ThreadPoolExecutor):
    """An executor that counts what it was given."""

    submitted = 0

    def submit(self, *arguments, **named):
        self.submitted += 1
        return super().submit(*arguments, **named)


def run(wanted, path):
    results = Results(path)
    with Counting(1) as executor:
        counts = sweep(wanted, results, executor)
    rows = results.rows(map(key, wanted))
    results.close()
    return counts, executor.submitted, rows


def test_every_cell_is_there_with_what_it_is(tmp_path):
    wanted = cells(BASE, VARY)
    counts, submitted, rows = run(wanted, tmp_path / "out.sqlite")
    assert counts == Counts(simulated=24, kept=0)
    assert submitted == 24
    for cell, row in zip(wanted, rows, strict=True):
        assert (row["num_steps"], row["concurrency"], row["seed"]) == (cell.num_steps, cell.concurrency, cell.seed)
        if cell.num_steps == 9:
            assert "num_steps rows" in row["error"]
        else:
            assert row["error"] is None
            assert row["Output Throughput (tok/s)"] == cell.run().metrics()["Output Throughput (tok/s)"]
    assert json.loads(rows[0]["prompt_tokens"]) == [10, 40]


def test_nothing_is_run_twice(tmp_path):
    path = tmp_path / "out.sqlite"
    run(cells(BASE, VARY | {"seed": [0]}), path)
    counts, submitted, _ = run(cells(BASE, VARY | {"seed": [0, 1]}), path)
    assert counts == Counts(simulated=8, kept=8)
    assert submitted == 8


def test_a_cell_survives_json():
    cell = Cell(prompt_tokens=(3, 9), shares=((0.5, 0.25), (0.5, 0.1)), rate=2.5)
    again = Cell.from_json(json.loads(json.dumps(cell.to_json())))
    assert again == cell
    assert key(again) == key(cell) != key(BASE)


def test_a_config_that_has_changed_is_another_cell(tmp_path):
    path = tmp_path / "mine.json"
    keys = []
    for name in ("llama-3.1-8b", "qwen3-4b"):
        path.write_text(json.dumps(read_config(name)[1]))
        keys.append(key(replace(BASE, model=str(path))))
    assert keys[0] != keys[1]
    path.write_text(json.dumps(read_config("llama-3.1-8b")[1], indent=2))
    assert key(replace(BASE, model=str(path))) == keys[0]
    assert key(Cell()) == "426fcfd3ce100fbe2d1553194d0ba3e2"  # as in files that were written before


def test_equal_cells_have_equal_keys():
    whole = Cell(rate=8, memory_share=1, shares=[[1, 0], [1, 0]])
    exact = Cell(rate=8.0, memory_share=1.0, shares=((1.0, 0.0), (1.0, 0.0)))
    assert whole == exact
    assert key(whole) == key(exact)


def test_keys_are_those_of_earlier_sweeps():
    assert key(BASE) == "468b67e5919866afd04f5069f644066e"
    assert key(Cell(rate=2.5, num_steps=0, shares=((0.5, 0.25), (0.5, 0.1)))) == "d05412bce6fb77aae454df47c34c08c4"


def test_a_tree_of_no_nodes_is_not_the_whole_chain(tmp_path):
    wanted = cells(BASE.with_values(topk=2, shares=((0.5, 0.2),) * 3), {"num_draft_tokens": [0, 4]})
    _, _, rows = run(wanted, tmp_path / "out.sqlite")
    assert [row["error"] for row in rows] == ["num_draft_tokens is 0; allowed: an integer of at least 2", None]
    assert cells(BASE, {"num_steps": [0]})[0].config == BASE.with_values(num_steps=0, num_draft_tokens=0).config


def test_a_seed_beyond_sqlites_integers_is_kept(tmp_path):
    wanted = cells(BASE, {"seed": [2**63 - 1, 2**63]})
    counts, _, rows = run(wanted, tmp_path / "out.sqlite")
    assert counts == Counts(simulated=2, kept=0)
    assert [row["seed"] for row in rows] == [2**63 - 1, str(2**63)]


def test_what_is_no_sweep_is_refused(tmp_path):
    text, other = tmp_path / "text", tmp_path / "other.sqlite"
    text.write_text("no database at all" * 100)
    with sqlite3.connect(other) as file:
        file.execute("create table cells (key text)")
    for path in (text, other):
        with pytest.raises(InputError, check=lambda error, path=path: (error.name, error.value) == ("out", str(path))):
            Results(path)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("vary", "colour")):
        cells(BASE, {"colour": [1]})


def rows_of(path) -> dict[str, tuple]:
    if not path.exists():
        return {}
    with sqlite3.connect(path) as file:
        try:
            return {row[0]: row for row in file.execute("select * from cells")}
        except sqlite3.OperationalError:
            return {}


def test_killed_and_resumed(tmp_path):
    """kill -9 within a cell: what was there stays as it is, the rest comes, and no worker is left behind.

    The fourth cell takes minutes, so that this program is in it when it is killed, however quick the machine.
    """
    path, base = tmp_path / "out.sqlite", Cell(output_tokens=100, prompt_tokens=(10, 40))
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
    worker = int(dict(zip(COLUMNS, next(iter(before.values())), strict=True))["worker"].split(":")[1])
    while _lives(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(worker)
    counts, submitted, _ = run(cells(base, {"requests": [60, 61, 62, 63, 64]}), path)
    assert counts == Counts(simulated=2, kept=3)
    assert submitted == 2
    after = rows_of(path)
    assert len(after) == 5
    assert {name: after[name] for name in before} == before


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_cluster_gives_what_this_process_gives(command, tmp_path):
    """A real Dask cluster of two workers, each a process."""
    distributed = pytest.importorskip("distributed")
    path, words = tmp_path / "out.sqlite", ["--requests", "6", "--prompt-tokens", "20", "--output-tokens", "12"]
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with distributed.LocalCluster(**settings) as cluster:
        address = cluster.scheduler_address
        words += ["--vary", "seed=0,1,2,3,4,5,6,7", "--cluster", address]
        assert command("sweep", "--out", str(path), *words).status == 0
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(path).values()]
    assert len({row["worker"] for row in rows}) == 2
    for row in rows[:2]:
        values = {name: row[name] for name in FIELDS} | {"shares": json.loads(row["shares"])}
        mine = run_cell(values)
        assert all(mine[name] == row[name] for name in mine if name not in ("seconds", "worker"))


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
    assert [words[0] for words in lines if len(words) == 4] == ["0.75", "0.25"]


def test_requests_of_one_token_have_no_tpot_to_show(command, tmp_path):
    load = ["--requests", "2", "--prompt-tokens", "9", "--output-tokens", "1", "--jobs", "1"]
    out, json_file = (str(tmp_path / name) for name in ("out.sqlite", "cells.json"))
    words = ["--out", out, "--vary", "num_steps=0,2", "--json", json_file]
    lines = [line.split() for line in command("sweep", *words, *load).out.splitlines()]
    assert sorted(words[0] for words in lines if words[-1:] == ["-"]) == ["0", "2"]
    assert [cell["Mean TPOT (ms)"] for cell in json.loads(Path(json_file).read_text())["cells"]] == [None, None]


def test_equal_cells_are_simulated_once(command, tmp_path):
    load = ["--requests", "1", "--prompt-tokens", "9", "--output-tokens", "2", "--jobs", "1"]
    words = ["--out", str(tmp_path / "out.sqlite"), "--vary", "rate=8,8.0", *load]
    assert "1 cells: 1 simulated, 0 kept" in command("sweep", *words).out


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
        (["--vary", "num_steps=9,10"], "shares", ((0.7,),) * 6),
        (["--vary", "seed=1", "--rate", "3", "--concurrency", "5"], "rate", "3.0"),
        (["--vary", "rate=1,2", "--concurrency", "5"], "rate", "[1, 2]"),
        (["--vary", "concurrency=1,2", "--rate", "3"], "rate", "3.0"),
        (["--vary", "seed=1,2", "--vary", "seed=4"], "vary", "seed=4"),
        (["--vary", "accept_rate=0", "--vary", "accept_rate=1"], "vary", "accept_rate=1"),
        (["--vary", "seed=1", "--jobs", "0"], "jobs", 0),
        (["--vary", "seed=1", "--jobs", "2", "--cluster", "tcp://127.0.0.1:1"], "jobs", 2),
    ],
)
def test_bad_input_is_one_sentence(command, tmp_path, words, name, value):
    assert command("sweep", "--out", str(tmp_path / "out.sqlite"), *words).refuses(name, value)
    assert list(tmp_path.iterdir()) == []
