"""Results of proofs on GPUs: what is kept of them, and what README says they came to."""

import json

import pytest

from specsim import proofs
from specsim.config import InputError
from specsim.differential import grid, run_grid

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
    assert all(results[f"{name}-cuda"]["is_ok"] for name in ("laws", "certify", "soak"))
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
    "laws": {"is_ok": False, "failures": ["target_only (fast), T 0.7"], "tests": [LAW]},
    "soak": {"is_ok": False, "failures": [], "missing": ["resumed"]},
    "conformance": {"outcomes": [{"passed": True}, {"passed": False}]},
}


@pytest.mark.parametrize("name", FAILED)
def test_a_proof_that_failed_is_not_kept(written, name):
    with pytest.raises(InputError, match="not a run that failed"):
        written({"command": f"specsim {name} --device cuda"} | FAILED[name] | ON_GPU)


@pytest.mark.parametrize(("name", "rows"), [("laws", "tests"), ("certify", "certificates")])
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


@pytest.mark.parametrize("change", [{"command": "specsim demo"}, {"command": "specsim"}, {"versions": {"torch": "2"}}])
def test_a_run_without_a_gpu_and_of_no_proof_is_not_kept(change, tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"command": "specsim laws"} | ON_GPU | change))
    with pytest.raises(InputError, match=r"allowed: what specsim diff, laws, certify, .* or soak wrote on a GPU"):
        proofs.keep(file)
