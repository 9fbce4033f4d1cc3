"""Mutants change one place, are drawn by seed, and run their module's tests on a copy."""

import ast
import json
from collections import Counter

import pytest
import run_mutants as mutation
from equivalents import EQUIVALENT
from mutants import mutants, sample
from run_mutants import KeptVerdict, MutantVerdict, Mutation, modules_with_tests, show

from specsim.core.errors import InputError
from specsim.correctness.faults.fault import read

SOURCE = '''
"""Told: 1 + 1."""
LIMIT = 3


@kernel
def _scale(x_ptr, n, BLOCK: tl.constexpr):
    """· is two bytes long: 2 + 2."""
    offs = row * stride + column
    x = tl.load(x_ptr + offs, mask=(offs < n) & live, other=7)
    tl.store(x_ptr + offs, tl.where(live, tl.maximum(x, low), high), mask=live)


def launch(x, n):
    if n and not x:
        raise ValueError(f"n is {n - 1}")
    block = block_of(n, 128)
    _scale[(n // block,)](x, n, BLOCK=block, num_warps=4)
    return n - block
'''
MADE = {
    ("comparison flipped", "offs < n", "(offs) <= (n)"),
    ("condition dropped", "(offs < n) & live", "(offs < n)"),
    ("condition dropped", "(offs < n) & live", "(live)"),
    ("mask dropped", "(offs < n) & live", "(((offs < n) & live) | True)"),
    ("mask dropped", "live", "((live) | True)"),
    ("branches swapped", "tl.where(live, tl.maximum(x, low), high)", "tl.where(live, high, tl.maximum(x, low))"),
    ("min for max", "tl.maximum", "tl.minimum"),
    ("stride swapped", "row * stride + column", "((row) + (column) * (stride))"),
    ("off by one", "7", "8"),
    ("and for or", "n and not x", "((n) or (not x))"),
    ("not dropped", "not x", "(x)"),
    ("condition negated", "n and not x", "not (n and not x)"),
    ("operands swapped", "n // block", "((block) // (n))"),
    ("sign changed", "n - block", "((n) + (block))"),
}


def test_every_kind_of_mutant_is_made():
    made = {(each.operator, each.old, each.new) for each in mutants("m", SOURCE)}
    assert made >= MADE


def test_a_mutant_changes_its_place_and_no_other():
    for each in mutants("m", SOURCE):
        changed = each.apply(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE)) or each.operator == "not dropped"
        assert len(changed.encode()) - len(SOURCE.encode()) == len(each.new.encode()) - len(each.old.encode())
        assert SOURCE.splitlines()[each.line - 1] not in changed.splitlines() or each.old in ("live", "x")


def test_texts_and_tuning_are_not_mutated():
    olds = {each.old for each in mutants("m", SOURCE)}
    assert not {"1", "2", "3", "4", "128", "n - 1"} & olds


def test_kernels_are_known_as_such():
    found = {(each.function, each.is_kernel) for each in mutants("m", SOURCE)}
    assert found == {("_scale", True), ("launch", False)}


def test_a_sample_covers_modules_and_operators_by_seed():
    candidates = {name: mutants(name, SOURCE) for name in ("a", "b")}
    drawn = sample(candidates, 20, 1)
    assert drawn == sample(candidates, 20, 1) != sample(candidates, 20, 2)
    assert set(Counter(each.module for each in drawn).values()) == {10}
    assert len({each.operator for each in drawn if each.module == "a"}) == 10
    assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("count", [3, 4, 10, 20, 23])
def test_a_sample_has_its_size_and_every_module(count):
    candidates = {name: mutants(name, SOURCE)[:size] for name, size in (("a", 21), ("b", 7), ("c", 14))}
    drawn = sample(candidates, count, 0)
    assert len(drawn) == count
    assert {each.module for each in drawn} == set(candidates)


def test_modules_have_their_tests_and_thousands_of_mutants():
    found = modules_with_tests()
    assert {"specsim.fast.kv.slots", "specsim.fast.drafters.eagle", "specsim.core.pool"} <= set(found)
    assert [path.name for path in found["specsim.fast.drafters.eagle"]] == ["test_drafters.py"]
    users = modules_with_tests(["specsim.simulator.cost", "specsim.simulator.forward"])  # a module that a file uses
    assert [[path.name for path in paths] for paths in users.values()] == [["test_cost.py"], ["test_cost.py"]]
    modules = ("specsim.fast.kv.slots", "specsim.fast.tree.construction")
    kernels = [mutant for module in modules for mutant in mutants(module, read(module))]
    assert sum(each.is_kernel for each in kernels) > 300
    module = "specsim.fast.kv.slots"
    for each in sample({module: mutants(module, read(module))}, 40, 0):
        assert ast.parse(each.apply(read(each.module)))


TEST = "from specsim.core import metrics\n\n\ndef test_it():\n"
TEST += "    assert metrics.acceptance([1, 1], 2, 3).accept_length == 2\n"


def test_mutants_are_tested_over_a_copy(tmp_path, monkeypatch):
    tests = tmp_path / "test_made_up.py"
    tests.write_text(TEST)
    monkeypatch.setattr(mutation, "modules_with_tests", lambda: {"specsim.core.metrics": (tests,)})
    source = read("specsim.core.metrics")
    drawn = [each for each in mutants("specsim.core.metrics", source) if each.function == "acceptance"]
    drawn = [each for each in drawn if each.operator == "sign changed"][-1:]
    monkeypatch.setattr(mutation, "sample", lambda *_: drawn)
    result = mutation.mutate(1, 0, jobs=1)
    value = result.to_json()
    assert (value["mutants"], value["killed"], value["score"]) == (1, 1, 1.0)
    assert value["results"][0]["by"] == "test_it"
    assert json.dumps(value)
    monkeypatch.setattr(mutation, "_tested", lambda *_: mutation.TestsOutcome(1, "test_never", 1.0))
    with pytest.raises(InputError, check=lambda error: error.value == "test_made_up.py (test_never)"):
        mutation.mutate(1, 0, jobs=1)


ONCE = "os.path.exists({0!r}) or (open({0!r}, 'w'), os.kill(os.getpid(), 15))"


@pytest.mark.parametrize(
    ("ending", "by"),
    [
        ("sys.exit(0)", None),
        ("sys.exit(1)", "exit status 1"),
        ("sys.exit(2)", "exit status 2"),
        ("os.kill(os.getpid(), 15)", "exit status -15"),
        (ONCE, None),
        ("time.sleep(60)", "no end"),
    ],
)
def test_failures_repeated_signals_and_no_end_are_kills(ending, by, ended, tmp_path):
    result = ended(ending.format(str(tmp_path / "begun")))
    assert [each.by for each in result.verdicts] == [by]
    assert result.is_complete


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "sys.exit(3)", "sys.exit(5)"])
def test_a_process_ended_from_outside_has_no_verdict(ending, ended, capsys):
    result = ended(ending)
    assert (result.verdicts, result.is_complete) == ((), False)
    show(result, print)
    out = capsys.readouterr().out
    assert "0 mutants" in out
    assert "not all that were drawn" in out


@pytest.fixture
def ended(monkeypatch, tmp_path):
    """Test a mutant whose tests end with this code."""

    def run(ending: str) -> Mutation:
        seconds = 1.0 if "sleep" in ending else 60.0
        monkeypatch.setattr(
            mutation, "modules_with_tests", lambda: {"specsim.core.metrics": (tmp_path / "test_made_up.py",)}
        )
        monkeypatch.setattr(mutation, "_limits", lambda _, tests: dict.fromkeys(tests, seconds))
        monkeypatch.setattr(mutation, "PROGRAM", f"import os, sys, time\n{ending}")
        return mutation.mutate(1, 0, jobs=1)

    return run


def test_survivors_are_shown_with_raw_and_net_score(monkeypatch, capsys):
    one, other = mutants("specsim.core.metrics", read("specsim.core.metrics"))[:2]
    verdicts = (
        MutantVerdict(one, "t", None, 1.0),
        MutantVerdict(other, "t", None, 1.0),
        MutantVerdict(one, "t", "test_it", 1.0),
    )
    monkeypatch.setitem(EQUIVALENT, other.key, "no matter")
    result = Mutation(verdicts, 0, 9, 3.0, True)
    assert [each.mutant for each in result.survivors] == [one]
    assert (result.to_json()["score_raw"], result.to_json()["score"]) == (1 / 3, 1 / 2)
    show(result, print)
    out = capsys.readouterr().out
    assert one.old in out
    assert "33.3%; 50.0% without 1 that are equivalent" in out


def test_an_equivalent_mutant_is_one_of_today():
    for key in EQUIVALENT:
        module = key.partition(": ")[0]
        candidates = [name for name in modules_with_tests() if module.startswith(f"{name}.")]
        assert any(key == each.key for name in candidates for each in mutants(name, read(name))), key


def test_bad_input_is_a_sentence(capsys):
    with pytest.raises(SystemExit, check=lambda error: error.code == 2):
        mutation.main(["--only", "specsim.none"])
    assert "only is 'specsim.none'; allowed: modules that have tests" in capsys.readouterr().err


def test_a_mutant_is_known_by_its_lines():
    [each] = [each for each in mutants("m", SOURCE) if each.new == "((n) + (block))"]
    assert each.key == "m.launch: return n - block -> return ((n) + (block))"
    dropped = next(each for each in mutants("m", SOURCE) if each.new == "((live) | True)")
    assert dropped.before == "tl.store(x_ptr + offs, tl.where(live, tl.maximum(x, low), high), mask=live)"
    assert dropped.after == "tl.store(x_ptr + offs, tl.where(live, tl.maximum(x, low), high), mask=((live) | True))"


@pytest.mark.parametrize("change", [{"by": 5}, {"by": ...}, {"seconds": "x"}, {"key": None}])
def test_a_kept_verdict_of_another_form_is_refused(change):
    row = {"key": "m", "tests": "t", "by": None, "seconds": 1.0, "line": 3}
    assert KeptVerdict.of(row, "row") == KeptVerdict("m", "t", None, 1.0)
    for wrong in ({name: value for name, value in (row | change).items() if value is not ...}, [row], None):
        with pytest.raises(InputError, check=lambda error: error.name.startswith("row")):
            KeptVerdict.of(wrong, "row")


def test_survivors_of_a_result_are_tested_again(tmp_path, monkeypatch):
    one, other, third, *_ = mutants("specsim.core.metrics", read("specsim.core.metrics"))
    kept = tmp_path / "kept.json"
    before = (
        MutantVerdict(one, "t", None, 1.0),
        MutantVerdict(other, "t", "it", 1.0),
        MutantVerdict(third, "t", None, 1.0),
    )
    kept.write_text(json.dumps(Mutation(before, 5, 9, 3.0, True).to_json()))
    monkeypatch.setitem(EQUIVALENT, third.key, "no matter")
    monkeypatch.setattr(mutation, "_limits", lambda _, tests: dict.fromkeys(tests, 60.0))
    monkeypatch.setattr(mutation, "_tested", lambda *_: mutation.TestsOutcome(1, "test_new", 1.0))
    result = mutation.mutate(300, 0, again=kept)
    assert [(each.mutant, each.by) for each in result.verdicts] == [(one, "test_new"), (other, "it"), (third, None)]
    assert (result.seed, result.is_complete, result.survivors) == (5, True, ())
    kept.write_text("{}")
    with pytest.raises(InputError, check=lambda error: error.name == "file" and error.value == str(kept)):
        mutation.mutate(300, 0, again=kept)
