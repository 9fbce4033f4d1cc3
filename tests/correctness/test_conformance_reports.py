"""The report of a failed case, and the script that repeats it without specsim."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from specsim.core.user_module import load_module
from specsim.correctness.conformance import chains
from specsim.correctness.conformance.comparison import difference
from specsim.correctness.conformance.contract import BY_NAME, Call, Value
from specsim.correctness.conformance.dump import script, script_path
from specsim.correctness.conformance.patterns import NOT_WRITTEN, patterns
from specsim.correctness.conformance.runner import CASES, call, function_of

PLAIN = Path(__file__).parent / "plain_kernels.py"
NUMBERS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3], [5, 8, 9, 7, 9]])
COPIES = {NOT_WRITTEN: torch.full((3, 5), -1), "equal to the argument b": torch.arange(15).view(3, 5)}


def shapes(found: torch.Tensor, expected: torch.Tensor = NUMBERS, rows: torch.Tensor | None = None) -> list[str]:
    made = Call({}, {"x": expected}, rows={} if rows is None else {"x": rows})
    different = difference(Value("x", "int64", "*", "returned"), found, made)
    return [words.partition(":")[0] for words in patterns(different.pair, COPIES)]


@pytest.mark.parametrize(
    ("found", "recognised"),
    [
        (torch.full((3, 5), -1), ["not written"]),
        (torch.arange(15).view(3, 5), ["equal to the argument b"]),
        (torch.zeros(3, 5).long(), []),
        (NUMBERS.mT.contiguous(), ["transposed"]),  # of another shape
        (NUMBERS.mT.reshape(3, 5), ["transposed"]),  # of the right shape, in the other order
        (NUMBERS.roll(1, 1), ["shifted"]),
        (NUMBERS.roll(-1, 0), ["shifted"]),
        (NUMBERS + 1, ["off by one"]),
        (NUMBERS - (NUMBERS == 9).long(), ["off by one"]),
        (NUMBERS + 2, []),
        (NUMBERS.flip(1), []),
    ],
)
def test_the_form_of_a_wrong_result_is_recognised(found, recognised):
    assert shapes(found) == recognised


def test_rows_that_are_not_compared_do_not_count():
    found = torch.cat([torch.full((1, 5), 77), NUMBERS[1:].roll(1, 1)])
    assert shapes(found, rows=torch.tensor([False, True, True])) == ["shifted"]
    masks = (NUMBERS > 4).repeat(3, 1)
    assert shapes(masks.roll(1, 1), masks) == ["shifted"]
    assert shapes(~masks, masks) == []


def test_a_stale_result_is_that_of_an_earlier_case():
    cases = [case for case in CASES if case.operation == "bonus_tokens"]
    earlier = cases[0].build().expected["bonus_tokens"]

    def stale(tokens, lens, out, stride):
        out.resize_(earlier.shape).copy_(earlier)

    outcome = call(stale, cases[1], torch.device("cpu"))
    assert outcome.patterns == (f"stale: the result of an earlier case, {cases[0].name}",)


def kernels(change: str, into: str, tmp_path: Path) -> str:
    source = PLAIN.read_text()
    assert change in source
    (tmp_path / "my_kernels.py").write_text(source.replace(change, into))
    return str(tmp_path / "my_kernels.py")


def test_one_case_runs_by_its_name_and_other_names_list_all(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    options = ["--module", kernels("= topk_index[b]", "= topk_index[0]", tmp_path), "--ops", "shift_ids"]
    status, printed, error = call("conformance", *options, "--case", "shift_ids: no requests", "--time-limit", "9")
    assert (status, "Wrong" in printed) == (0, False)
    assert error == "1 cases, each call ended after 9 seconds (--time-limit)\n"
    status, printed, error = call("conformance", *options, "--case", "no request")
    assert (status, error.count("\n")) == (2, 1)
    assert printed.splitlines() == [case.id for case in CASES if case.operation == "shift_ids"]
    assert "case is 'no request'; allowed: one of 4 cases, such as shift_ids: no requests" in error


RUN_ALL = """
import runpy, sys
for words in {words!r}:
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        print(end.code, flush=True)
"""


def test_scripts_of_failed_cases_repeat_them_without_specsim(tmp_path, monkeypatch, call):
    """A wrong kernel, a right one, one that exits and one without end, whose process ends."""
    monkeypatch.chdir(tmp_path)
    module = kernels("= topk_index[b]", "= topk_index[0]", tmp_path)
    options = ["--module", module, "--ops", "shift_ids", "--dump", "failed", "--device", "cpu"]
    assert call("conformance", *options)[0] == 1
    files = sorted(Path("failed").iterdir())
    assert len(files) == 3
    case = next(case for case in CASES if case.operation == "bonus_tokens")
    words = [[str(files[1])], [str(files[1]), str(PLAIN)]]
    for name, body in {"exits": "raise SystemExit(0)", "loops": "while True: pass"}.items():
        Path(f"{name}.py").write_text(f"def fill_bonus_tokens(*arguments):\n    {body}")
        Path(f"{name}_case.py").write_text(
            script(f"{name}.py", load_module(str(tmp_path / f"{name}.py")), case, "cpu", 0.5)
        )
        words.append([f"{name}_case.py"])
    blocked = tmp_path / "blocked"
    (blocked / "specsim").mkdir(parents=True)
    (blocked / "specsim" / "__init__.py").write_text("raise ImportError")
    environment = os.environ | {"PYTHONPATH": str(blocked)}
    command = [sys.executable, "-c", RUN_ALL.format(words=words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wrong, *_, right, end = done.stdout.splitlines()
    assert "input_ids[2]: expected 8, found 7" in wrong
    assert (right, end) == ("None", "the function calls exit()")
    assert "equal" in done.stdout
    assert (done.returncode, "Timeout" in done.stderr) == (1, True)
    files[0].write_text("mine")
    status, _, error = call("conformance", *options)
    assert (status, files[0].read_text()) == (2, "mine")
    assert f"a folder without another file named {files[0].name}" in error
    status, _, error = call("conformance", *options[:-3], module)
    assert (status, Path(module).is_file()) == (2, True)


def test_the_script_of_every_case_gives_its_verdict(monkeypatch):
    """Right kernels pass all of them; distributions with many draws are packed."""
    monkeypatch.setattr(chains, "ROWS", 512)
    plain, paths = load_module(str(PLAIN)), set()
    compiled = cache(lambda checks: compile(checks, "checks", "exec"))  # equal in all scripts
    for case in CASES:
        source, mark, checks = script(str(PLAIN), plain, case, "cpu", 60).partition("# The checks, copied")
        names = {"__name__": "script"}
        exec(compile(source, case.id, "exec"), names)
        exec(compiled(mark + checks), names)
        function = function_of(plain, BY_NAME[case.operation])
        if not case.may_refuse:
            wrong = names["wrong_result"](function, names["make_operation"](), names["make_call"](), names["DEVICE"])
            assert wrong is None, (case.id, str(wrong))
        paths.add(script_path(Path(), case))
    assert len(paths) == len(CASES)
