"""Commands that run code of a user: no exit or error in it ends a command as done."""

import pytest

from specsim.cli import main as program

RULE = """
from specsim import AcceptanceRule
def f(*_):
    {}
rule = AcceptanceRule("mine", "best", f)
"""
DRAFTER = """
class D:
    def propose(self, *_):
        {}
    def finish(self, *_):
        {}
"""
END = "return [], [], []"
RAISED = {"exits": "raise SystemExit(0)", "raises": "raise ValueError('boom')"}
COMMANDS = {
    "sampling-test": "sampling-test --rule {rule} --tokens 1",
    "generate --rule": "generate --rule {rule} --temperature 1 --max-new-tokens 4",
    "diff": "diff --rule {rule} --temperature 1 --impl reference",
    "generate": "generate --drafter {drafter} --max-new-tokens 4",
    "run": "run --drafter {drafter}",
    "run --compare": "run --drafter {drafter} --compare",
    "accept": "accept --drafter {drafter} --prompts 1 --max-new-tokens 4",
    "accept --target": "accept --target tiny --drafter {drafter} --prompts 1 --max-new-tokens 4",
}


@pytest.fixture
def user(tmp_path):
    """Write a rule and a drafter with these bodies: places for the commands."""

    def write(body: str, finish: str) -> dict[str, str]:
        (tmp_path / "rule_of_user.py").write_text(RULE.format(body))
        (tmp_path / "drafter_of_user.py").write_text(DRAFTER.format(body if finish == END else END, finish))
        return {"rule": f"{tmp_path}/rule_of_user.py:rule", "drafter": f"{tmp_path}/drafter_of_user.py:D"}

    return write


@pytest.mark.parametrize("body", RAISED)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("shipped")
def test_code_that_does_not_return_is_bad_input(user, call, command, body, assert_one_sentence):
    field = "rule" if "{rule}" in COMMANDS[command] else "drafter"
    result = call(*COMMANDS[command].format(**user(RAISED[body], END)).split())
    assert_one_sentence(result, f"{field} is")
    assert f"{field}_of_user.py, line" in result[2]


@pytest.mark.usefixtures("shipped")
def test_a_finish_that_exits_is_bad_input(user, call, assert_one_sentence):
    place = user("", "raise SystemExit(0)")["drafter"]
    assert_one_sentence(call(*f"generate --drafter {place} --max-new-tokens 4".split()), "drafter is")


@pytest.mark.parametrize(
    "proposal", ["[1], [-1], ['x']", "['x'], [-1], [1.0]", "[1], [None], [1.0]", "iter([1]), [-1], [1.0]", "5, [], []"]
)
@pytest.mark.usefixtures("shipped")
def test_a_proposal_of_other_types_is_bad_input(user, call, proposal, assert_one_sentence):
    place = user(f"return {proposal}", END)["drafter"]
    assert_one_sentence(call(*f"generate --drafter {place} --max-new-tokens 4".split()), "proposal of D is")


@pytest.mark.parametrize("code", [0, None])
def test_no_code_can_end_a_command_as_done(monkeypatch, call, code, assert_one_sentence):
    def app(*_, **__):
        raise SystemExit(code)

    monkeypatch.setattr(program, "app", app)
    assert_one_sentence(call("diff"))
