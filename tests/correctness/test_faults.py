"""The fault catalogue: faults are injected into a copy, and checks report their field and nothing else."""

import ast
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import specsim
from specsim.core import uniforms
from specsim.core.provenance import versions
from specsim.correctness.faults import Fault, FaultFinding, StaleFault, Trial
from specsim.correctness.faults import campaign as running
from specsim.correctness.faults.campaign import CatalogueResult, FaultResult
from specsim.correctness.faults.catalogue import FAULTS
from specsim.correctness.faults.checks import CHECKS, run_check
from specsim.correctness.faults.checks.memory import guarded
from specsim.correctness.faults.fault import apply, changed, copied_package, environment, path_of, read, sources
from specsim.correctness.faults.trial import findings
from specsim.reference import drafting, tree

BY_NAME = {fault.name: fault for fault in FAULTS}
SHARED = "specsim.serving.requests"
STOPS = {SHARED: "[-            if self.finish_reason is not None:\n                break\n-]"}
HARMLESS = {SHARED: "before = len(self.token_ids){+ + 0+}"}
ORACLE = Trial("oracle", dict(topk=1, num_steps=2, page_size=1, sampling="greedy", max_new_tokens=2))


def fault(edits: dict[str, str]) -> Fault:
    return Fault("made-up", "none", "none", "c", "s", ("tokens",), edits, ORACLE)


def shown(monkeypatch, *faults: Fault) -> CatalogueResult:
    monkeypatch.setattr("specsim.correctness.faults.catalogue.FAULTS", faults)
    return running.run_catalogue(jobs=1)


# Injection.


@pytest.mark.parametrize("name", BY_NAME)
def test_no_fault_is_stale(name):
    """The quoted text occurs once in the source, and the changed source is still Python."""
    for module, text in changed(BY_NAME[name].edits).items():
        assert text != read(module)
        assert ast.parse(text)


def test_injected_code_defines_the_names_that_it_uses(tmp_path):
    """A renamed variable of the source would make a fault an error of every run, which no field tells."""
    for name, fault in BY_NAME.items():
        for module, text in changed(fault.edits).items():
            (tmp_path / f"{name}_{module}.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "concise"]
    assert subprocess.run([*command, str(tmp_path)], capture_output=True, text=True).stdout == "All checks passed!\n"


@pytest.mark.parametrize(
    ("old", "copies"), [("no such place", 1), ("self", 1), ("def take(", 2)], ids=["none", "several", "two copies"]
)
def test_an_edit_has_to_match_exactly_once(old, copies):
    with pytest.raises(StaleFault):
        apply(f"[-{old}-]{{+new+}}", SHARED, read(SHARED) * copies)
    with pytest.raises(StaleFault):
        changed({"specsim.gone": "[-a-]"})
    edits = {SHARED: "def take{+n+}(@@def [-taken-]{+given+}("}  # one after the other
    assert list(changed(edits)) == [SHARED]
    assert "def given(" in changed(edits)[SHARED]


def test_the_copy_has_every_source_and_only_the_change():
    with copied_package(changed(STOPS)) as root:
        for name, folder in sources().items():
            for path in folder.rglob("*.py"):
                copy = root.joinpath(*name.split("."), path.relative_to(folder))
                assert not copy.is_symlink()
                assert (copy.read_bytes() == path.read_bytes()) == (path != path_of(SHARED))
    assert not root.exists()
    assert read(SHARED) == path_of(SHARED).read_text()


def test_a_package_on_another_file_system_is_copied(monkeypatch):
    def fails(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("os.link", fails)
    with copied_package(changed(STOPS)) as root:
        assert (root / "specsim" / "__init__.py").read_bytes() == path_of("specsim").read_bytes()
        assert path_of(SHARED, root / "specsim").read_text() == changed(STOPS)[SHARED]


def test_an_installed_package_is_copied_too():
    """In a copy, as in a wheel, the implementations are folders inside the package."""
    program = """from specsim.correctness.faults.fault import copied_package
with copied_package({}) as root: print(len([*root.rglob('*.py')]))"""
    with copied_package({}) as root:
        run = subprocess.run([sys.executable, "-c", program], env=environment(root), capture_output=True, text=True)
        assert run.stderr == ""
        assert int(run.stdout) == len([*root.rglob("*.py")]) > 300


def test_a_copy_finds_packages_of_the_python_path(tmp_path, monkeypatch):
    """The copy itself comes first, and folders are named relative to where the process was started."""
    program = "import specsim, elsewhere; print(specsim.__file__)"
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "elsewhere.py").touch()
    (tmp_path / "packages" / "specsim.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "packages")
    with copied_package({}) as root:
        run = subprocess.run(
            [sys.executable, "-c", program], env=environment(root), cwd=root, capture_output=True, text=True
        )
        assert run.stderr == ""
        assert run.stdout.strip() == str(root / "specsim" / "__init__.py")


# Checking.


def test_only_a_change_with_an_effect_is_found(monkeypatch):
    catalogue = shown(monkeypatch, fault(STOPS), replace(fault(HARMLESS), name="harmless"))
    found, harmless = catalogue.results
    assert (found.is_detected_as_named, found.first.field, found.before) == (True, "tokens", ())
    assert found.fault.code == "shared"
    assert (harmless.is_detected, harmless.first, catalogue.missed) == (False, None, (harmless,))
    first, second = catalogue.to_json()["results"]
    assert (first["name"], first["detected"], first["detected_by"]) == ("made-up", True, "tokens")
    assert first["first_divergence"]["expected"] != first["first_divergence"]["found"]
    assert (second["detected"], second["detected_by"], second["first_divergence"]) == (False, None, None)


COUNTERS, TOKENS = FaultFinding("counters", "p", 1, 2), FaultFinding("tokens", "p", 3, 4)


@pytest.mark.parametrize(
    ("findings", "before", "is_detected", "is_as_named", "first"),
    [
        ((COUNTERS,), (), True, False, COUNTERS),
        ((COUNTERS, TOKENS), (), True, True, TOKENS),  # a named field identifies the fault
        ((TOKENS,), (TOKENS,), False, False, TOKENS),  # a check that fails without the fault detects none
    ],
)
def test_a_fault_is_detected_by_what_it_alone_changes(findings, before, is_detected, is_as_named, first):
    found = FaultResult(fault(STOPS), findings, before, 0.0)
    assert (found.is_detected, found.is_detected_as_named, found.first) == (is_detected, is_as_named, first)


def test_a_process_that_dies_or_does_not_end_is_a_finding(monkeypatch):
    dies = {"specsim.correctness.faults.trial": "import os\nos._exit(9)\n"}
    ((crash,),) = running._findings(dies, [ORACLE], "cpu")
    assert (crash.field, crash.found) == ("crash", "9: ")
    monkeypatch.setattr(running, "SECONDS", 0.5)
    ((end,),) = running._findings({"specsim.correctness.faults.trial": "while True:\n    pass\n"}, [ORACLE], "cpu")
    assert end.field == "no end"


def test_an_error_is_a_finding(monkeypatch):
    def broken(name, setting, device):
        return [1 // 0]

    monkeypatch.setattr("specsim.correctness.faults.trial.run_check", broken)
    (found,) = findings(ORACLE, "cpu")
    assert (found["field"], found["found"].split(":")[0]) == ("error", "ZeroDivisionError")


# Checks. `run_catalogue` runs every setting without its fault too.


def fields_of(name: str, **setting) -> list[str]:
    return [each.field for each in run_check(name, setting, "cpu")]


def by_higher_index(scores, count, _):
    return scores.topk(count).indices.flip(0).sort(-1).values


def accept_noise(*names):
    return uniforms.accept_uniforms(*names, 0)[:, 0]


# A check with its setting, the function that an error replaces, and the field that shows it.
ERRORS = {
    "equal scores": ("trees", dict(pools="tied", count=50), (tree, "select", by_higher_index), "tree"),
    "parent lists": (
        "trees",
        dict(pools="malformed", count=200),
        (tree, "parents_of", lambda *arguments: []),
        "malformed trees",
    ),
    "a uniform used twice": (
        "distribution",
        dict(tokens=2304, temperature=0.7, top_k=3),
        (uniforms, "final_uniforms", accept_noise),
        "distribution",
    ),
    "sampled drafts": (
        "distribution",
        dict(tokens=2304, verifier="rejection"),
        (drafting, "draft_uniforms", lambda *names: uniforms.final_uniforms(*names[:3])[:, None]),
        "distribution",
    ),
}


@pytest.mark.parametrize(("check", "setting", "error", "field"), ERRORS.values(), ids=ERRORS)
def test_a_check_finds_an_error_and_nothing_without_it(check, setting, error, field, monkeypatch):
    assert fields_of(check, impl="reference", **setting) == []
    monkeypatch.setattr(*error)
    filters = {"temperature": 1.0, "top_k": 0} if "top_k" in setting else {}
    assert fields_of(check, impl="reference", **setting | filters) == [field]


BATCHED = dict(impl="reference", topk=2, num_steps=2, num_draft_tokens=5, page_size=4, batch=3, ids=[4, 2, 9])


def test_requests_are_followed_through_a_batch(monkeypatch):
    """Notes belong to their request whatever its row is; a wrong root shows in its first round."""
    from specsim.core.phases import DraftInput

    setting = BATCHED | dict(arrivals=[0, 1, 0], sampling="warm", schedule="overlap", prefix_cache=True)
    assert fields_of("batched", **setting) == []
    kept = DraftInput.filter
    monkeypatch.setattr(DraftInput, "filter", lambda self, rows: kept(self, rows.flip(0)))
    assert "draft state" in fields_of("batched", **setting)


@pytest.mark.parametrize(("kind", "size", "room"), [("reads", 2, 4), ("writes", 4, 2)], ids=["reads", "writes"])
def test_accesses_outside_the_tensors_are_found_and_masked(kind, size, room):
    pytest.importorskip("triton")
    from specsim.fast.model.rows import add

    rows = torch.ones(1, 4)
    out = torch.zeros(8)
    with guarded() as guard:
        add(rows, rows, out=out[:4].view(1, 4))
        assert guard.first is None
        add(torch.ones(1, size), rows, out=out[4 : 4 + room].view(1, room))
    assert (guard.first.field, guard.first.place) == ("out of bounds", "kernel _add_kernel")
    assert guard.first.found == f"2 {kind}"
    assert out[4:].tolist() == ([2.0, 2.0, 1.0, 1.0] if kind == "reads" else [2.0, 2.0, 0.0, 0.0])


# The command.


def test_the_command_shows_and_writes_every_result(tmp_path, call, monkeypatch):
    catalogue = CatalogueResult(
        (FaultResult(fault(STOPS), (FaultFinding("tokens", "p", 1, 2),), (), 1.0),), "cpu", 2.0, "", versions("cpu")
    )
    monkeypatch.setattr("specsim.correctness.faults.run_catalogue", lambda names, **options: catalogue)
    file = tmp_path / "faults.json"
    status, out, _ = call("faults", "--name", "made-up", "--json", str(file))
    assert (status, "made-up" in out) == (0, True)
    value = json.loads(file.read_text())
    assert (value["faults"], value["detected"], value["detected_as_named"]) == (1, 1, 1)
    assert value["command"] == "specsim faults --name made-up"
    missed = replace(catalogue, results=(replace(catalogue.results[0], findings=()),))
    monkeypatch.setattr("specsim.correctness.faults.run_catalogue", lambda names, **options: missed)
    status, out, _ = call("faults")
    assert (status, "the check finds nothing" in out) == (1, True)


@pytest.mark.parametrize(("option", "text"), [(["--name", "none"], "name is 'none'"), (["--jobs", "0"], "jobs is 0")])
def test_bad_input_is_a_sentence(option, text, call):
    status, _, error = call("faults", *option)
    assert (status, text in error) == (2, True)


# The catalogue.


def test_entries_are_complete():
    assert len(BY_NAME) == len(FAULTS)
    for each in FAULTS:
        assert each.trial.check in CHECKS, each.name
        assert each.fields, each.name
        assert all(isinstance(text, str) and text for text in (each.source, each.operation, each.cause, each.symptom))
        assert json.loads(json.dumps(dict(each.trial.setting))) == each.trial.setting, each.name


def test_nothing_of_the_package_knows_of_faults():
    """Only commands and the course, which no engine imports, use the catalogue: no fault can run by accident."""
    for name, folder in sources().items():
        for path in folder.rglob("*.py"):
            if "faults" not in path.parts and not {"cli", "course", "maintain"} & set(path.parts):
                assert "specsim.correctness.faults" not in path.read_text(), f"{name}: {path}"
    assert specsim.__file__ == str(path_of("specsim"))


@pytest.mark.whole  # specsim faults does
def test_a_fault_of_a_kernel_is_detected_as_named():
    catalogue = running.run_catalogue(["tail-indices-moved-not-kv"], jobs=1, device="cpu")
    assert catalogue.missed == ()
    assert catalogue.results[0].fault.code == "fast"
