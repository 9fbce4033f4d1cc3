"""Sweeps write every cell and run none twice, with any executor."""

import json
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from hashlib import sha256

import pytest

from specsim.core.errors import InputError
from specsim.simulator.cell import Cell
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.model import read_config
from specsim.simulator.sweep import LATER, VERSION, Results, SweepCounts, cells, key, sweep

BASE = Cell(requests=6, concurrency=2, prompt_tokens=(10, 40), output_tokens=12)
VARY = {"num_steps": [0, 1, 3, 9], "concurrency": [1, 4], "seed": [0, 1, 2]}


class Counting(ThreadPoolExecutor):
    """An executor that counts its tasks."""

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
    assert counts == SweepCounts(simulated=24, stored=0)
    assert submitted == 24
    for cell, row in zip(wanted, rows, strict=True):
        assert (row["num_steps"], row["concurrency"], row["seed"]) == (cell.num_steps, cell.concurrency, cell.seed)
        if cell.num_steps == 9:
            assert row["error"].startswith("num_steps is 9; allowed: at most 8")
        else:
            assert row["error"] is None
            assert row["Output Throughput (tok/s)"] == cell.run().metrics()["Output Throughput (tok/s)"]
    assert json.loads(rows[0]["prompt_tokens"]) == [10, 40]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("num_steps", "three"),
        ("num_steps", 2.5),
        ("shares", "[["),
        ("shares", '[["a"]]'),
        ("efficiency", "[]"),
        ("efficiency", '{"no such": 1}'),
        ("prompt_tokens", b"\x00"),
        ("prefix_cache", "yes"),
        ("model", 7),
        ("worker", 7),
        ("seconds", "long"),
        ("error", 1.5),
        ("Output Throughput (tok/s)", "fast"),
    ],
)
def test_a_row_of_other_types_is_refused(tmp_path, column, value):
    path = tmp_path / "out.sqlite"
    run([BASE], path)
    with sqlite3.connect(path) as file:
        file.execute(f'update cells set "{column}" = ?', (value,))
    with pytest.raises(InputError, check=lambda error: str(path) in str(error)):
        Results(path).rows()


def test_nothing_is_run_twice(tmp_path):
    path = tmp_path / "out.sqlite"
    run(cells(BASE, VARY | {"seed": [0]}), path)
    counts, submitted, _ = run(cells(BASE, VARY | {"seed": [0, 1]}), path)
    assert counts == SweepCounts(simulated=8, stored=8)
    assert submitted == 8


def test_a_cell_survives_json():
    efficiency = Efficiency(bandwidth=0.5, host=1e-3)
    cell = Cell(prompt_tokens=(3, 9), shares=((0.5, 0.25), (0.5, 0.1)), rate=2.5, efficiency=efficiency, kept=("gap",))
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


def test_equal_cells_have_equal_keys():
    whole = Cell(rate=8, memory_share=1, shares=[[1, 0], [1, 0]])
    exact = Cell(rate=8.0, memory_share=1.0, shares=((1.0, 0.0), (1.0, 0.0)))
    assert whole == exact
    assert key(whole) == key(exact)


def test_a_key_is_the_digest_of_all_fields():
    """Keys stay the same, so that files of earlier sweeps are valid; a changed default gives another key."""
    fields = {"model": "llama-3.1-8b", "hardware": "H100-SXM", "tensor_parallel": 1, "drafter": "eagle3"}
    fields |= {"draft_vocab": 32000, "topk": 1, "num_steps": 0, "num_draft_tokens": None, "page_size": 16}
    fields |= {"shares": [[0.5, 0.25], [0.5, 0.1]], "requests": 256, "concurrency": 16, "rate": 2.5}
    fields |= {"prompt_tokens": [256, 768], "output_tokens": [128, 384], "schedule": "overlap", "plain_schedule": None}
    fields |= {"prefill": "mixed", "chunk_tokens": 8192, "max_running": 256, "memory_share": 0.9, "seed": 0}
    fields |= {"efficiency": asdict(Efficiency(bandwidth=0.6))}
    cell = Cell(rate=2.5, num_steps=0, shares=((0.5, 0.25), (0.5, 0.1)), efficiency=Efficiency(bandwidth=0.6))
    assert key(cell) == sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]
    assert key(cell) != key(replace(cell, efficiency=Efficiency()))


def test_a_tree_of_no_nodes_is_not_the_whole_chain(tmp_path):
    wanted = cells(BASE.with_values(topk=2, shares=((0.5, 0.2),) * 3), {"num_draft_tokens": [0, 4]})
    _, _, rows = run(wanted, tmp_path / "out.sqlite")
    assert [row["error"] for row in rows] == ["num_draft_tokens is 0; allowed: an integer of at least 2", None]
    assert cells(BASE, {"num_steps": [0]})[0].config == BASE.with_values(num_steps=0, num_draft_tokens=0).config


def test_a_seed_beyond_sqlites_integers_is_kept(tmp_path):
    wanted = cells(BASE, {"seed": [2**63 - 1, 2**63]})
    counts, _, rows = run(wanted, tmp_path / "out.sqlite")
    assert counts == SweepCounts(simulated=2, stored=0)
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


def test_a_file_of_another_version_is_refused(tmp_path):
    path = tmp_path / "out.sqlite"
    Results(path).close()
    Results(path).close()
    for version in (0, VERSION + 1):
        with sqlite3.connect(path) as file:
            file.execute(f"pragma user_version = {version}")
        file.close()
        with pytest.raises(InputError, match=f"earlier sweep of version {VERSION}, not {version}") as refused:
            Results(path)
        assert (refused.value.name, refused.value.value) == ("out", str(path))


def test_equal_cells_are_simulated_once(tmp_path):
    counts, submitted, rows = run([BASE, replace(BASE, rate=None), BASE], tmp_path / "out.sqlite")
    assert counts == SweepCounts(simulated=1, stored=0)
    assert submitted == 1
    assert len(rows) == 3


def test_a_file_of_an_earlier_sweep_gains_the_later_fields(tmp_path):
    """Its cells are kept, with the defaults of the fields that it did not have."""
    path, wanted = tmp_path / "out.sqlite", cells(BASE, {"seed": [0, 1]})
    run(wanted[:1], path)
    with sqlite3.connect(path) as file:
        for name in LATER:
            file.execute(f'alter table cells drop column "{name}"')
    file.close()
    counts, submitted, rows = run(wanted, path)
    assert (counts, submitted) == (SweepCounts(1, 1), 1)
    defaults = {name: json.dumps(value) if value == () else value for name, value in LATER.items()}
    assert all(rows[0][name] == rows[1][name] == defaults[name] for name in LATER)


def test_files_of_a_cell_are_part_of_its_key(tmp_path):
    path = tmp_path / "gpu.json"
    cell = BASE.with_values(hardware=str(path))
    found = {key(cell)}
    for text in ("{}", "[]"):
        path.write_text(text)
        found.add(key(cell))
    assert len(found) == 3
