"""Version, threads, and the commands accept, soak and demo."""

import json
import os

import pytest

from specsim.acceptance.settings import DRAFTERS, SETTINGS, StudySetting, chain
from specsim.acceptance.study import Measurement, Study, TargetCheck
from specsim.core.metrics import acceptance
from specsim.correctness.differential.implementation import ALONE

pytestmark = pytest.mark.usefixtures("shipped")


def test_version(call):
    assert call("--version") == (0, "specsim 0.1.0\n", "")


def test_a_shell_completes_commands_and_options(monkeypatch, call):
    monkeypatch.setenv("_SPECSIM_COMPLETE", "bash_complete")
    for words, completed in (("specsim ge", "generate"), ("specsim generate --topk 1 --num-d", "--num-draft-tokens")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        status, out, _ = call()
        assert (status, out.split()) == (0, [f"plain,{completed}"])


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_is_installed_once(monkeypatch, call, tmp_path, shell):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHELL", f"/bin/{shell}")
    _, script, _ = call("--show-completion")
    for _ in range(2):
        assert call("--install-completion")[0] == 0
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert script.strip() == texts[f"specsim.{shell}"].strip()
    assert shell == "fish" or texts[".zshrc"].count("source") == 1


def test_completion_of_another_shell_is_refused(monkeypatch, call, assert_one_sentence):
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert_one_sentence(call("--install-completion"), "SHELL")


@pytest.mark.parametrize(
    ("command", "given", "used"), [("demo", None, "1"), ("sampling-test", "3", "3"), ("generate", None, None)]
)
def test_small_models_get_one_thread_unless_told_otherwise(call, monkeypatch, command, given, used):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "0")  # which is put back in the end
        monkeypatch.delenv(name) if given is None else monkeypatch.setenv(name, given)
    assert call(command, "--help")[0] == 0
    assert os.environ.get("OMP_NUM_THREADS") == os.environ.get("MKL_NUM_THREADS") == used


OWN = """
from specsim.core.token_drafter import Proposal


class Never:
    def propose(self, request_id, tokens, limits):
        return Proposal([], [], [])

    def finish(self, request_id, tokens, prompt_len):
        pass
"""


def test_accept(call, tmp_path):
    file = tmp_path / "accept.json"
    status, out, err = call("accept", "--prompts", "2", "--max-new-tokens", "6", "--json", str(file))
    assert (status, err) == (0, "")
    assert "Acceptance on 2 held-out prompts, 6 new tokens each" in out
    study = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (study["num_prompts"], study["num_edits"], len(study["measurements"])) == (2, 2, len(SETTINGS))
    assert {row["setting"]["drafter"] for row in study["measurements"]} == set(DRAFTERS)


def test_accept_measures_named_drafters(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    few = ("--prompts", "1", "--max-new-tokens", "4")
    names = ("own.py:Never", "mtp", "mtp")
    status, out, _ = call(
        "accept", *few, *(word for name in names for word in ("--drafter", name)), "--json", "own.json"
    )
    assert (status, "Never chain of 3" in out) == (0, True)
    rows = json.loads((tmp_path / "own.json").read_text())["measurements"]
    assert [row["setting"]["drafter"] for row in rows] == ["own.py:Never"] * 8 + ["mtp"] * 4
    assert {row["everything"]["accept_length"] for row in rows[:8]} == {None}  # no round has drafts


def test_accept_exits_1_where_outputs_differ(call, monkeypatch):
    measured = Measurement(
        StudySetting("eagle3", chain(1)), acceptance([1, 0], 1, 2), acceptance([0], 1, 2), num_equal=1
    )
    monkeypatch.setattr(
        "specsim.acceptance.study.measure",
        lambda *_, **__: Study(2, 1, 64, (measured,), (TargetCheck("equal", 1, "all 2", False),)),
    )
    assert call("accept")[0] == 1


@pytest.mark.parametrize("is_ok", [True, False])
def test_soak(call, tmp_path, monkeypatch, is_ok):
    asked = []
    versions = {"python": "3", "specsim": "1", "torch": "2"}
    soaked = {"command": "specsim soak", "device": "cpu", "versions": versions, "date": "", "is_ok": is_ok}
    soaked |= {"figures": {}, "missing": None, "failures": [], "programs": []}

    class Result:
        def __init__(self, *arguments, **options):
            asked.append((arguments, options))
            self.is_ok = is_ok

        def show(self, console):
            console.print("shown")

        def to_json(self):
            return soaked

    monkeypatch.setattr("specsim.correctness.soak.soak", Result)
    file = tmp_path / "soak.json"
    given = "--impl fast --device cpu --graph eager --jobs 1".split()
    options = {"impl": "fast", "device": "cpu", "graph": "eager", "jobs": 1, "progress": True, "shares": ALONE}
    options |= {"adaptive": None, "policy_name": None}
    drawn = {
        "--requests 7 --seed 3": {"num_requests": 7, "seed": 3, "program": None},
        "--adaptive throughput": {"program": None, "adaptive": "throughput", "policy_name": "throughput"},
        "--program x": {"program": "x"},
    }
    for words, expected in drawn.items():
        assert call("soak", *given, *words.split(), "--json", str(file)) == (0 if is_ok else 1, "shown\n", "")
        assert asked.pop() == ((), options | expected)
        assert json.loads(file.read_text()) == {"schema": "specsim/soak/1"} | soaked
    call("soak")
    default = {"impl": "reference", "device": None, "graph": None, "jobs": 2, "program": None}
    assert asked == [((), options | default)]


def test_demo(call):
    status, out, err = call("demo")
    assert (status, err) == (0, "")
    assert "plain decoding's: yes" in out


def test_demo_exits_1_where_outputs_differ(call, monkeypatch):
    monkeypatch.setattr("specsim.cli.walkthrough.run", lambda *_: False)
    assert call("demo") == (1, "", "")
