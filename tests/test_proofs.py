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


def test_a_part_of_a_grid_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(proofs, "KEPT", tmp_path / "kept")
    file = tmp_path / "part.json"
    run_grid("g", TWO, impl="reference", shard="1/2", json_file=file)
    with pytest.raises(InputError, match="not 1 of 2 cells"):
        proofs.keep(file)
    run_grid("g", TWO, impl="reference", json_file=file)
    result = json.loads(proofs.keep(file).read_text())
    assert result["decisions"] > 0
    assert "results" not in result


def test_what_a_proof_came_to_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(proofs, "KEPT", tmp_path / "kept")
    file = tmp_path / "faults.json"
    file.write_text(json.dumps({"command": "specsim faults --device cuda", "faults": 40, "as_named": 39} | ON_GPU))
    assert proofs.keep(file).name == "faults-cuda.json"
    [*_, row, _, run] = proofs.proofs().splitlines()
    assert row == "| `specsim faults --device cuda` | 39 of 40 planted faults found by the field that names them |"
    assert run == "Measured on one NVIDIA H200, torch 2, triton 3, 2026-11-22 (`fast/measurements/`)."


@pytest.mark.parametrize("change", [{"command": "specsim demo"}, {"command": "specsim"}, {"versions": {"torch": "2"}}])
def test_a_run_without_a_gpu_and_of_no_proof_is_not_kept(change, tmp_path):
    file = tmp_path / "result.json"
    file.write_text(json.dumps({"command": "specsim laws"} | ON_GPU | change))
    with pytest.raises(InputError, match=r"allowed: what specsim diff, laws, certify, .* or soak wrote on a GPU"):
        proofs.keep(file)
