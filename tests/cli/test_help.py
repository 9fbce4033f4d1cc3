"""The help of the program and of every command: groups, widths, ranges, examples."""

import re
import shlex
from dataclasses import MISSING, fields

import pytest

from specsim.cli.command import MOST_SHOWN, summary
from specsim.cli.help import OPTION_GROUPS
from specsim.cli.main import FUNCTIONS, command
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import names
from specsim.simulator.reproduce.tables import TABLES

NAMES = list(FUNCTIONS)
HELPS = ("--help", "--help-all")


def titles(text: str) -> list[str]:
    return re.findall(r"^(\S.*):$", text, re.MULTILINE)


def test_commands_are_grouped_and_none_is_cut_off(call):
    status, out, err = call("--help")
    assert (status, err) == (0, "")
    assert titles(out) == ["Run", "Check", "Measure", "Simulate", "Learn", "Options"]
    assert "..." not in out.partition("Run:")[2]
    shown = dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", out.partition("Run:")[2], re.MULTILINE))
    assert set(NAMES) <= set(shown)
    for name in NAMES:
        assert shown[name] == summary(FUNCTIONS[name])
        assert len(shown[name]) <= 60
        assert shown[name].endswith(".")


@pytest.mark.parametrize("arguments", [(), ("--help",), *((name, text) for name in NAMES for text in HELPS)])
def test_help_is_plain_text_of_80_columns(call, arguments):
    status, out, err = call(*arguments)
    assert (status, err) == (0, "")
    assert out.startswith("Usage: specsim")
    assert out.isascii()
    assert max(map(len, out.splitlines())) <= 80
    assert "[default: (" not in out


@pytest.mark.parametrize("name", NAMES)
def test_help_begins_with_what_the_command_does(call, name):
    _, out, _ = call(name, "--help")
    text = out.partition("\n\n")[2]
    assert text.startswith(f"  {summary(FUNCTIONS[name])}\n\n")
    assert 0 < text.index("  Exit status: 0 ") < text.index("  Example")
    assert call(name, "-h") == (0, out, "")


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_shown_once_in_a_known_group(call, name):
    _, out, _ = call(name, "--help-all")
    out = out.partition("  Example")[2]
    for field in command(name).all_fields.values():
        assert len(re.findall(rf"^  {re.escape(field.label)}( |$)", out, re.MULTILINE)) == 1
    groups = [title for title in titles(out) if title in OPTION_GROUPS]
    assert groups == sorted(groups, key=OPTION_GROUPS.index)


@pytest.mark.parametrize("name", NAMES)
def test_help_shows_few_options(call, name):
    _, out, _ = call(name, "--help")
    shown = re.findall(r"^  (-\S+)", out.partition("  Example")[2], re.MULTILINE)
    assert len(shown) <= MOST_SHOWN
    required = {field.label for field in command(name).fields.values() if field.default is MISSING}
    assert required <= {*shown, "FILE"}
    assert ("--help-all" in shown) == (call(name, "--help-all")[1] != out)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_range(name):
    numbers = [field for field in command(name).fields.values() if field.kind in (int, float)]
    assert all(re.match(r"at least |above |-?[\d.]+ to ", field.limits) for field in numbers)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_commands_of_the_program(name):
    examples = re.findall(r"^ +specsim (.*)$", command(name).help, re.MULTILINE)
    assert examples
    for example in examples:
        first, *words = shlex.split(example)
        assert first == name
        command(name).make_context(name, words)  # fails for an option that the command does not have


def test_a_default_and_a_range_share_a_bracket(call):
    _, out, _ = call("generate", "--help-all")
    words = " ".join(out.split())
    assert "--topk INTEGER Draft tokens kept at each step; 1 makes a chain." in words
    assert "[default: 4; at least 1]" in words
    assert "[default: num_steps + 1 for a chain, 8 for a tree, or what fits; at least 2]" in words


@pytest.mark.parametrize(
    ("before", "names"),
    [
        ("GPU: ", names()),
        ("other options: ", TABLES),
        ("cost model: ", [field.name for field in fields(Efficiency)]),
    ],
)
def test_help_lists_all_names(call, before, names):
    """Help loads no simulator, so its lists are written by hand."""
    shown = " ".join(call("simulate", "--help-all")[1].split()).split(before)[1]
    listed = re.split(r"[;.] ", shown)[0]
    assert sorted(re.split(", | or ", listed)) == sorted(names)
