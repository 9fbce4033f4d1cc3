"""Grids of the differential test: cells, shards, files, verdicts, and the command."""

import json
import re
from collections import Counter
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import combinations

import pytest
import torch
from rich.console import Console

import specsim.correctness.differential.grid_run as running
from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.correctness.differential import CellResult, GridResult, check, grid, run_grid
from specsim.correctness.differential.cell import AXES, cell_of
from specsim.correctness.differential.grid_run import required
from specsim.correctness.differential.grids import QUICK, is_valid
from specsim.correctness.differential.pairs import make_pair
from specsim.correctness.differential.result import Divergence, show

CELL = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3))
WARM = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, sampling="warm", kind="eagle3"))
COVERING = grid("pairwise")
pytestmark = pytest.mark.usefixtures("budgets_once")


# The printed result of a grid.


def outcome(*cells, **changes):
    result = GridResult("g", "f", len(cells), "cpu", "float32", "reference", {}, "", "", ("rounds",), cells)
    return replace(result, **changes)


WHOLE = dict.fromkeys(("prefill", "draft", "verify", "draft_extend"), 1)
GOOD = CellResult("a", decisions=100, compared=WHOLE, coverage={"rounds": 1})


INCOMPLETE = replace(
    GOOD, compared={**WHOLE, "verify": 0}, not_compared={"verify": WHOLE["verify"]}, within_rounding_error=1
)


@pytest.mark.parametrize(
    ("result", "reasons"),
    [
        (outcome(GOOD), []),
        (outcome(replace(GOOD, within_rounding_error=2)), []),
        (outcome(replace(GOOD, within_rounding_error=30), dtype="bfloat16"), []),
        (outcome(replace(GOOD, coverage={}), num_cells=2), []),
        (outcome(replace(GOOD, mismatches=1)), ["1 mismatches"]),
        (outcome(replace(GOOD, coverage={})), ["not covered: rounds"]),
        (outcome(CellResult("b", compared=WHOLE)), ["not covered: rounds"]),
        (
            outcome(replace(GOOD, within_rounding_error=3)),
            ["3.00% of the decisions are within rounding error, more than 0.1%"],
        ),
        (outcome(replace(GOOD, compared={**WHOLE, "verify": 0})), ["some phase was never fully compared in a"]),
        # bfloat16 may leave a phase incomplete, and reports it
        (outcome(INCOMPLETE, replace(GOOD, id="b"), dtype="bfloat16"), []),
        (outcome(INCOMPLETE, dtype="bfloat16"), ["fully compared were only 0% of verify, less than 25%"]),
        (outcome(dtype="bfloat16", num_cells=9), ["no cell was fully compared"]),
        (outcome(replace(GOOD, compared={}), dtype="bfloat16", num_cells=9), ["no cell was fully compared"]),
    ],
)
def test_a_grid_passes_or_fails_in_words(result, reasons):
    assert result.failures() == result.to_json()["failures"] == reasons
    assert result.to_json()["incomplete_cells"] == [cell.id for cell in result.cells if cell.is_empty]


def test_the_largest_logprob_error_of_all_cells_is_printed(capsys):
    cells = [replace(GOOD, id=str(error), max_logprob_error=error) for error in (1e-3, 4e-2, 0.0)]
    show(outcome(*cells), Console(width=100))
    assert "largest logprob error  4.0e-02" in re.sub(" {2,}", "  ", capsys.readouterr().out)


def test_a_chain_has_the_narrowest_tree_only():
    assert is_valid({"topk": 1, "num_draft_tokens": 2})
    assert not is_valid({"topk": 1, "num_draft_tokens": 8})


def test_a_cell_whose_requests_end_in_prefill_shows_nothing():
    ended = replace(CELL, sampling=tuple(replace(each, max_new_tokens=1) for each in CELL.sampling))
    assert check(ended, "reference").is_empty


def test_grids_have_the_cells_they_promise():
    assert len(grid("quick")) == len(QUICK)
    assert len(COVERING) >= 60
    cells = grid("full")
    assert len({cell.id for cell in cells}) == len(cells)
    assert {cell.id for cell in COVERING} <= {cell.id for cell in cells}
    trees = {(c.config.topk, c.config.num_steps, c.config.num_draft_tokens, c.config.page_size) for c in cells}
    assert len(trees) > 250
    with pytest.raises(InputError, check=lambda error: error.name == "grid"):
        grid("all")


def test_the_pairwise_grid_covers_every_pair():
    from specsim.correctness.pairwise import pairwise

    cells = [dict(cell) for cell in pairwise(AXES, is_valid)]
    for first, second in combinations(AXES, 2):
        met = {(cell[first], cell[second]) for cell in cells}
        valid = {(a, b) for a in AXES[first] for b in AXES[second] if is_valid({first: a, second: b})}
        assert met == valid
    assert {cell_of(cell).id for cell in cells} <= {cell.id for cell in COVERING}


@pytest.mark.whole  # as specsim diff does whenever it runs that grid
def test_the_pairwise_grid_exercises_what_it_has_to():
    counts = Counter()
    for cell in COVERING:
        counts.update(check(cell, "reference").coverage)
    assert [name for name in required(COVERING, "reference") if not counts[name]] == []


TWO = (CELL, replace(WARM, rounds=1))


def test_shards_and_resume_make_the_whole(tmp_path, monkeypatch):
    file = tmp_path / "grid.json"
    whole = run_grid("g", TWO, impl="reference")
    first = run_grid("g", TWO, impl="reference", shard="1/2", json_file=file)
    assert [cell.id for cell in first.cells] == [CELL.id]
    assert not first.is_complete
    ran = []
    monkeypatch.setattr(running, "check", lambda cell, **given: ran.append(cell.id) or check(cell, **given))
    both = run_grid("g", TWO, impl="reference", resume=True, json_file=file)
    assert ran == [WARM.id]
    stripped = [[replace(cell, seconds=0.0) for cell in result.cells] for result in (both, whole)]
    assert stripped[0] == stripped[1]
    assert json.loads(file.read_text())["results"][0]["id"] == CELL.id


def test_the_file_holds_every_cell_as_soon_as_it_is_done(tmp_path, monkeypatch):
    def interrupted(cell, **given):
        if cell.id == WARM.id:
            raise KeyboardInterrupt
        return check(cell, **given)

    monkeypatch.setattr(running, "check", interrupted)
    file = tmp_path / "grid.json"
    with pytest.raises(KeyboardInterrupt):
        run_grid("g", TWO, impl="reference", json_file=file)
    assert [cell["id"] for cell in json.loads(file.read_text())["results"]] == [CELL.id]


def test_a_divergence_survives_the_file(tmp_path):
    divergence = Divergence("a", 2, "draft", 1, 3, "scores", 0.5, 0.25)
    result = outcome(replace(GOOD, mismatches=1, first_divergence=divergence))
    value = json.loads(json.dumps(result.to_json()))
    assert CellResult.from_json(value["results"][0]) == result.cells[0]
    assert value["first_divergence"]["field"] == "scores"


@pytest.mark.whole  # .ci/run shares grids among processes
def test_processes_that_share_the_cells_find_the_same():
    alone, shared = (run_grid("g", TWO, impl="reference", jobs=jobs) for jobs in (1, 2))
    assert [replace(cell, seconds=0.0) for cell in shared.cells] == [replace(cell, seconds=0.0) for cell in alone.cells]


def test_a_grid_reports_its_settings_and_date():
    result = run_grid("g", TWO[:1], impl="reference").to_json()
    assert result["command"] == "specsim diff --grid g --device cpu --dtype float32"
    assert datetime.fromisoformat(result["date"]) <= datetime.now(UTC)


def test_shards_run_one_after_the_other_complete_one_file(tmp_path):
    file = tmp_path / "shards.json"
    run_grid("g", TWO, impl="reference", shard="1/2", json_file=file)
    whole = run_grid("g", TWO, impl="reference", shard="2/2", resume=True, json_file=file)
    assert whole.is_complete
    assert [cell["id"] for cell in json.loads(file.read_text())["results"]] == [cell.id for cell in TWO]


def test_bad_input_in_a_worker_is_bad_input():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("pair", "nobody")):
        run_grid("g", [replace(TWO[0], pair="nobody")], impl="reference", jobs=2)


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [
        *(pytest.param("device", "cuda", {"impl": impl}, marks=NO_GPU) for impl in ("fast", "reference")),
        *(("shard", shard, {}) for shard in ("9/9", "5/3", "0/3", "x", "1", "1/", "/2", "1/0", "-1/2")),
        ("jobs", 0, {}),
        ("dtype", "int8", {}),
        ("resume", True, {}),
    ],
)
def test_bad_options_of_a_run_are_refused(name, value, others):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        run_grid("g", TWO, **{"impl": "reference", name: value} | others)


def test_resuming_from_something_else_is_refused(tmp_path):
    file = tmp_path / "grid.json"
    run_grid("g", TWO[1:], impl="reference", json_file=file)
    with pytest.raises(InputError, check=lambda error: error.name == "json" and "fingerprint" in error.value):
        run_grid("g", TWO, impl="reference", resume=True, json_file=file)
    for text in ("", "[]", "{}", '{"results": 1}'):
        file.write_text(text)
        with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("json", str(file))):
            run_grid("g", TWO, impl="reference", resume=True, json_file=file)
    with pytest.raises(InputError, check=lambda error: error.name == "grid"):
        run_grid("g", (), impl="reference")


# Changes of the first kept cell, and other results in place of all.
BAD_RESULTS = {
    "mismatches null": {"mismatches": None},
    "mismatches missing": {"mismatches": ...},
    "seconds a text": {"seconds": "x"},
    "compared a number": {"compared": 5},
    "decisions negative": {"decisions": -5},
    "a mismatch without a divergence": {"mismatches": 1},
    "an unknown cell": {"id": "nobody"},
    "an unknown field": {"more": 1},
    "twice": {},
    "null": None,
    "a number": 5,
    "no list": (),
    "a list of null": [None],
}


@pytest.fixture(scope="module")
def kept_grid(tmp_path_factory):
    file = tmp_path_factory.mktemp("kept") / "grid.json"
    run_grid("g", TWO, impl="reference", json_file=file)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_kept_results_of_another_form_are_refused(name, kept_grid, tmp_path):
    change = BAD_RESULTS[name]
    first, *others = kept_grid["results"]
    results: object = {} if change == () else change
    if isinstance(change, dict):
        results = [{key: each for key, each in (first | change).items() if each is not ...}, *others]
        results = [first, first] if name == "twice" else results
    file = tmp_path / "grid.json"
    file.write_text(json.dumps(kept_grid | {"results": results}))
    wrong = "results[0]" if change and change != 5 else "results"
    with pytest.raises(InputError, check=lambda error: error.name == "json" and wrong in error.allowed):
        run_grid("g", TWO, impl="reference", resume=True, json_file=file)


def test_an_infinite_logprob_error_is_resumed(kept_grid):
    divergence = Divergence("a", 2, "draft", 1, 3, "scores", 0.5, 0.25)
    wrong = asdict(replace(GOOD, mismatches=1, first_divergence=divergence)) | {"max_logprob_error": None}
    assert CellResult.from_json(wrong).max_logprob_error > 1e300


def test_a_result_of_another_schema_is_not_resumed(tmp_path, call):
    file = tmp_path / "grid.json"
    words = ["--topk", "1", "--num-steps", "1", "--batch", "1", "--impl", "reference", "--json", str(file)]
    assert call("diff", *words)[0] == 0
    kept = json.loads(file.read_text())
    assert kept["schema"] == "specsim/diff/1"
    assert call("diff", *words, "--resume")[0] == 0
    for schema in ("specsim/diff/0", "specsim/diff/99", None):
        file.write_text(json.dumps(kept | {"schema": schema}))
        status, out, err = call("diff", *words, "--resume")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"allowed: a file of schema specsim/diff/1, not {schema}; without --resume" in err


@pytest.mark.parametrize(
    "changes",
    [
        dict(mode="loose"),
        dict(graph="all"),
        dict(graph="round", config=SpecConfig(release="round")),
        dict(graph="round", grammars={0: None}),
        dict(chunks=0),
        dict(chunks=6),
    ],
)
def test_a_cell_that_cannot_be_is_refused(changes):
    with pytest.raises(InputError, check=lambda error: error.name in changes):
        replace(CELL, **changes)
    for name in ("eagle", "eagle-gpt", "medusa-llama"):
        with pytest.raises(InputError, check=lambda error, name=name: (error.name, error.value) == ("pair", name)):
            make_pair(name)


# The command.


def test_diff_shows_one_cell(call, tmp_path):
    file = tmp_path / "out.json"
    setting = "--topk 2 --num-steps 3 --num-draft-tokens 6 --page-size 4 --drafter eagle --family qwen3 --batch 2"
    modes = "--draft-kv ancestor --extend ragged --release round --temperature 0.8 --free"
    status, out, err = call("diff", *setting.split(), *modes.split(), "--impl", "reference", "--json", str(file))
    assert (status, err) == (0, "")
    assert out.rstrip().endswith("The implementations are equal.")
    names = [line.split("  ")[0] for line in out.splitlines()]
    assert {"cells", "decisions", "within rounding error", "mismatches", "largest logprob error"} <= set(names)
    value = json.loads(file.read_text())
    assert (value["mismatches"], value["cells"], value["first_divergence"]) == (0, 1, None)
    assert {"grid", "device", "dtype", "versions", "seconds", "coverage", "results", "max_logprob_error"} <= set(value)


def test_diff_puts_every_other_request_under_an_expression(call, monkeypatch):
    cells = []
    monkeypatch.setattr(running, "check", lambda cell, **_: cells.append(cell) or replace(GOOD, id=cell.id))
    status, _, err = call("diff", "--family", "shipped", "--regex", "(no|yes)!", "--impl", "reference", "--jobs", "2")
    assert (status, err) == (0, "")
    (cell,) = cells
    assert (cell.id, list(cell.grammars)) == ("one cell, (no|yes)!", [0, 2])
    assert 0 < cell.grammars[2].matcher().allowed().sum() < 20


def test_diff_fails_on_a_mismatch_and_names_its_place(call, monkeypatch):
    wrong = replace(GOOD, mismatches=1, first_divergence=Divergence("a", 1, "draft", 0, 0, "positions", 15, 16))
    monkeypatch.setattr(running, "check", lambda cell, **_: replace(wrong, id=cell.id))
    status, out, _ = call("diff", "--impl", "reference")
    assert status == 1
    assert "First divergence: " in out
    assert "positions is 16" in out
    assert "Not shown to be equal: " in out


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("--grid", "huge"), "grid"),
        (("--grid", "quick", "--regex", "a"), "regex"),
        (("--regex", "a"), "regex"),
        (("--grid", "quick", "--topk", "2"), "topk"),
        (("--grid", "quick", "--free"), "free"),
        (("--shard", "5/3"), "shard"),
        (("--dtype", "float64"), "dtype"),
        (("--impl", "slow"), "impl"),
        (("--batch", "0"), "batch"),
        (("--topk", "1", "--num-draft-tokens", "8"), "num_draft_tokens"),
        (("--family", "gpt"), "family"),
        (("--graph", "round", "--release", "round"), "graph"),
        (("--resume",), "resume"),
        (("--json", "/nowhere/out.json"), "json"),
    ],
)
def test_diff_refuses_bad_input(call, arguments, name):
    status, out, err = call("diff", "--impl", "reference", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith(f"specsim: {name} is ")
