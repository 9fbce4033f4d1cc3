"""Code of a user: its errors are one sentence, and its files hide no module of a library."""

import os
import pickle
import subprocess
import sys

import pytest

from specsim import InputError
from specsim.core import user_module
from specsim.core.errors import require
from specsim.core.rule import Tree, load_rule
from specsim.core.user_module import load_module, load_object, user_code

LIBRARY = ("json", "random", "queue", "numpy", "torch", "click")
UNPRINTABLE = """
class Mute(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
"""
RAISED = {
    "import os; os._exit(0)": "SystemExit: 0, mine.py, line 7",
    "while True: pass": "CallTimeout: no result within 0.2 seconds, mine.py, line 7",
    "raise SystemExit(0)": "SystemExit: 0, mine.py, line 7",
    "raise ValueError('b\\noom')": "ValueError: b oom, mine.py, line 7",
    "raise Mute": "Mute: an object of type Mute, mine.py, line 7",
}
RULE = f"""{UNPRINTABLE}
def f(*_):
    {{}}
from specsim import AcceptanceRule
rule = AcceptanceRule("mine", "best", f)
class Object:
    def __init__(self): f()
"""
TREE = Tree([5], [-1], [-1], [-1], depth_limit=0)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write a file of a user in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(text: str, name: str = "mine.py") -> str:
        (tmp_path / name).write_text(text)
        return name

    return write


@pytest.mark.parametrize("body", RAISED)
def test_what_a_rule_raises_names_the_place_in_its_file(file, body, monkeypatch):
    import torch

    monkeypatch.setattr(user_module, "CALL_SECONDS", 0.2)
    monkeypatch.setattr(os, "_exit", os._exit)
    rule = load_rule(f"{file(RULE.format(body))}:rule")
    with pytest.raises(InputError) as error:
        rule.walk(TREE, torch.ones(1, 4), None, [0.5], 0.5)
    assert (error.value.name, error.value.value) == ("rule", "mine.py:rule")
    assert error.value.allowed.endswith(f"({RAISED[body]})")
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)  # as from a worker process


def test_a_fork_ends_where_it_is_told_to(tmp_path):
    """As forks of multiprocessing do, in a process that has loaded code of a user."""
    (tmp_path / "mine.py").write_text("")
    code = (
        "import os; from specsim.core.user_module import load_module; load_module('mine.py')\n"
        "try: process = os.fork() or os._exit(3)\n"
        "except SystemExit: print('goes on')\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


@pytest.mark.parametrize("body", RAISED)
def test_an_object_that_cannot_be_made_is_bad_input(file, body, monkeypatch):
    import torch  # noqa: F401 - which the file imports, within the limit

    monkeypatch.setattr(user_module, "CALL_SECONDS", 0.2)
    with pytest.raises(InputError, check=lambda error: error.name == "drafter" and RAISED[body] in error.allowed):
        load_object(f"{file(RULE.format(body))}:Object", "drafter", "")


def test_a_module_whose_import_does_not_end_is_bad_input(file, monkeypatch):
    monkeypatch.setattr(user_module, "CALL_SECONDS", 0.2)
    with pytest.raises(InputError, check=lambda error: "CallTimeout: no result within 0.2 s" in error.allowed):
        load_module(file("while True: pass"))


def test_a_module_that_exits_when_read_is_bad_input(file):
    name = file("def __getattr__(name): raise SystemExit(0)")
    with pytest.raises(InputError, check=lambda error: "SystemExit: 0" in error.allowed):
        load_object(f"{name}:rule", "rule", "")


def test_files_named_like_libraries_hide_none_of_them(tmp_path):
    for name in (*LIBRARY, "pathlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(0)")
    words = [sys.executable, "-m", "specsim", "schema", "generate"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:1], done.stderr) == (0, "{", "")


def test_an_interrupt_goes_through():
    with pytest.raises(KeyboardInterrupt), user_code("rule", "", ""):
        raise KeyboardInterrupt


def test_values_that_cannot_be_shown_do_not_break_a_message():
    class Mute:
        def __repr__(self):
            raise SystemExit(0)

    with pytest.raises(InputError, match="an object of type Mute"):
        require(False, "accept", Mute(), "a function")


@pytest.mark.parametrize("name", LIBRARY)
def test_a_file_named_like_a_library_hides_nothing(file, name):
    before = sys.modules.get(name)
    module = load_module(file("value = 7", f"{name}.py"))
    assert module.value == 7
    assert sys.modules.get(name) is before
    assert sys.modules[module.__name__] is module


def test_a_folder_named_first_stays_behind_the_libraries(file, tmp_path):
    file("value = 7", "colorsys.py")
    load_module(file("import colorsys; assert hasattr(colorsys, 'rgb_to_hsv')"))
    assert sys.path[-1] == str(tmp_path)


def test_a_name_of_two_modules_is_refused(file):
    file("value = 7", "json.py")
    file("value = 7", "specsim_user_kernels.py")
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("module", "json")):
        load_module("json")
    assert load_module("specsim_user_kernels").value == 7


def test_a_file_of_the_same_time_is_executed_again(tmp_path):
    path = tmp_path / "specsim_test_rule.py"
    for value in (1, 2):
        path.write_text(f"VALUE = {value}\n")
        os.utime(path, (0, 0))
        assert value == load_module(str(path)).VALUE
        assert load_module(str(path)) is load_module(str(path))
