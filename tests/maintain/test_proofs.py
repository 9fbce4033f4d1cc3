"""Results of proofs on GPUs: what is kept of them, and what README says they came to."""

import json

import pytest

from specsim.core.errors import InputError
from specsim.correctness.differential import grid, run_grid
from specsim.maintain import measurements, proofs

ON_GPU = {"versions": {"gpu": "NVIDIA H200", "torch": "2", "triton": "3"}, "date": "2026-11-22T08:31:16+00:00"}
TWO = grid("quick")[:2]


def kept() -> dict[str, dict]:
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in proofs.KEPT.glob("*-cuda.json")}


def test_readme_shows_the_results_that_are_kept():
    readme = (proofs.ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == proofs.written(readme)


def test_all_four_grids_are_kept_whole_and_equal():
    grids = [each for name, each in kept().items() if name.startswith("diff-")]
    assert {(each["grid"], each["dtype"], each["device"]) for each in grids} == {
        (grid, dtype, "cuda") for grid in ("pairwise", "full") for dtype in ("float32", "bfloat16")
    }
    assert all(each["cells"] == each["num_cells"] and each["mismatches"] == 0 for each in grids)


def test_every_other_proof_that_is_kept_holds():
    results = kept()
    assert all(results[f"{name}-cuda"]["is_ok"] for name in ("sampling-test", "certify", "soak"))
    assert all(each["passed"] for each in results["conformance-cuda"]["outcomes"])


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a result as a command does, and keeps it in a folder of its own."""
    monkeypatch.setattr(proofs, "KEPT", tmp_path / "kept")
    file = tmp_path / "result.json"

    def keep(value: dict) -> dict:
        file.write_text(json.dumps(value))
        return json.loads(proofs.keep(file).read_text(encoding="utf-8"))

    return keep


@pytest.fixture(scope="module")
def of_a_grid(tmp_path_factory):
    """What two cells came to, as if the fast column had been run on a GPU, and what the first of them alone did."""
    file, found = tmp_path_factory.mktemp("grid") / "grid.json", []
    for shard in (None, "1/2"):
        run_grid("g", TWO, impl="reference", shard=shard, json_file=file)
        value = json.loads(file.read_text()) | ON_GPU | {"impl": "fast", "device": "cuda"}
        assert all(each.startswith("never exercised") for each in value["failures"])  # which two cells are not asked to
        found.append(value | {"failures": []})
    return found


def test_a_part_of_a_grid_is_not_kept(written, of_a_grid):
    whole, part = of_a_grid
    with pytest.raises(InputError, match="not 1 of 2 cells"):
        written(part)
    result = written(whole)
    assert result["decisions"] > 0
    assert "results" not in result
    assert "| g | float32 | 2 |" in proofs.grids()


def test_a_grid_is_a_row_of_what_came_of_it(written, of_a_grid):
    counts = {
        "decisions": 1000,
        "undecidable": 15,
        "compared": {"tokens": 60, "logprobs": 3},
        "left_out": {"tokens": 1},
    }
    figures = counts | {"mismatches": 2, "max_logprob_error": 0.25, "parted": ["one", "another", "a third"]}
    assert written(of_a_grid[0] | figures)["parted"] == 3
    assert "| g | float32 | 2 | 98.4% | 1,000 | 15 (1.500%) | 2 | 2.5e-01 |" in proofs.grids().splitlines()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"versions": {"torch": "2"}}, "or soak wrote on a GPU"),
        ({"impl": "reference"}, "not a run of the reference"),
        ({"mismatches": 7, "failures": ["7 mismatches"]}, "not a run that failed"),
    ],
)
def test_a_grid_without_a_gpu_of_the_reference_or_that_failed_is_not_kept(written, of_a_grid, change, reason):
    with pytest.raises(InputError, match=reason):
        written(of_a_grid[0] | change)


LAW = {"impl": "reference", "is_control": True}
FAILED = {
    "certify": {"is_ok": False, "failures": ["rejection (fast) on a chain: no constant law"], "certificates": []},
    "sampling-test": {"is_ok": False, "failures": ["target_only (fast), T 0.7"], "tests": [LAW]},
    "soak": {"is_ok": False, "failures": [], "missing": ["resumed"]},
    "conformance": {"outcomes": [{"passed": True}, {"passed": False}]},
}


@pytest.mark.parametrize("name", FAILED)
def test_a_proof_that_failed_is_not_kept(written, name):
    with pytest.raises(InputError, match="not a run that failed"):
        written({"command": f"specsim {name} --device cuda"} | FAILED[name] | ON_GPU)


@pytest.mark.parametrize(("name", "rows"), [("sampling-test", "tests"), ("certify", "certificates")])
def test_a_run_of_both_columns_is_not_kept(written, name, rows):
    result = {"command": f"specsim {name} --impl both --device cuda", "is_ok": True, "failures": []} | ON_GPU
    assert written(result | {rows: [{"impl": "fast"}]})
    with pytest.raises(InputError, match="not a run of the reference"):
        written(result | {rows: [{"impl": "fast"}, {"impl": "reference"}]})


def test_what_a_proof_came_to_is_counted(written):
    written({"command": "specsim faults --device cuda", "faults": 40, "as_named": 39} | ON_GPU)
    assert [path.name for path in proofs.KEPT.iterdir()] == ["faults-cuda.json"]
    [*_, row, _, run] = proofs.proofs().splitlines()
    assert row == "| `specsim faults --device cuda` | 39 of 40 planted faults found by the field that names them |"
    assert run == "Measured on one NVIDIA H200, torch 2, triton 3, 2026-11-22 (`fast/measurements/`)."


def rows(names: str, *values: tuple) -> list[dict]:
    return [dict(zip(names.split(), each, strict=True)) for each in values]


LAW_TESTS = (1000, False, True), (200, False, False), (30, False, False), (5, True, True), (7, True, False)
DISTANCES = ("lossless", 0.0), ("lossless", 0.0), ("lossless", 0.25), ("lossy", 0.5), ("wrong", 0.125), ("wrong", 0.0)
OUTCOMES = ("equal", True), ("equal", True), ("refused", True), ("different", False)


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        (
            "sampling-test",
            {"tests": rows("tokens is_control is_rejected", *LAW_TESTS)},
            "3 laws of 1,230 tokens, 1 rejected; of the reference's 2 wrong engines, on the CPU, 1 are",
        ),
        (
            "certify",
            {"certificates": rows("promise total_variation_float", *DISTANCES)},
            "2 of 3 lossless cases exact; 1 of 2 wrong ones are not",
        ),
        (
            "conformance",
            {"outcomes": rows("status passed", *OUTCOMES)},
            "4 cases: 2 equal, 1 refused, 1 wrong",
        ),
        (
            "soak",
            {"figures": {"requests": 2000, "slots audited": 12345, "mismatches": 2}},
            "2,000 requests, 12,345 slots audited, 2 mismatches",
        ),
    ],
)
def test_what_is_not_as_it_should_be_is_counted_as_such(name, value, told):
    assert proofs.TOLD[name](value) == told


def test_a_soak_is_kept_without_its_programs(written):
    soak = {"command": "specsim soak --device cuda", "is_ok": True, "figures": {"requests": 1}, "programs": [{}]}
    assert written(soak | ON_GPU) == {name: value for name, value in soak.items() if name != "programs"} | ON_GPU


def test_the_command_keeps_results_and_writes_the_tables_in_their_places(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(proofs, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(measurements, "README", tmp_path / "README.md")
    old = "before\n" + "".join(f"<!-- {mark} -->\nold\n<!-- /{mark} -->\n" for mark in proofs.TABLES) + "after\n"
    measurements.README.write_text(old)
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"command": "specsim faults", "faults": 2, "as_named": 1} | ON_GPU))
    proofs.main([str(file)])
    assert capsys.readouterr().out == f"{proofs.KEPT / 'faults-cuda.json'}\n"
    readme = measurements.README.read_text()
    assert readme == proofs.written(old) == old.replace("old\n", "{}").format(proofs.grids(), proofs.proofs())
    assert "| `specsim faults` | 1 of 2 planted" in readme


@pytest.mark.parametrize("change", [{"command": "specsim demo"}, {"command": "specsim"}, {"versions": {"torch": "2"}}])
def test_a_run_without_a_gpu_and_of_no_proof_is_not_kept(change, written):
    with pytest.raises(
        InputError, match=r"allowed: what specsim diff, sampling-test, certify, .* or soak wrote on a GPU"
    ):
        written({"command": "specsim sampling-test"} | ON_GPU | change)
