"""The help of the program and of every command: groups, widths, ranges, examples."""

import re
import shlex
from dataclasses import fields

import pytest
from typer.main import get_command

from specsim.cli.help import COMMON, OPTION_GROUPS, GenerateHelp, summary
from specsim.cli.main import COMMANDS, app
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import names
from specsim.simulator.reproduce.tables import TABLES

PROGRAM = get_command(app)
NAMES = [each.__name__.replace("_", "-") for commands in COMMANDS.values() for each in commands]


def titles(text: str) -> list[str]:
    return re.findall(r"^(\S.*):$", text, re.MULTILINE)


def options_of(name: str) -> list:
    return [param for param in PROGRAM.commands[name].params if param.param_type_name == "option"]


def test_commands_are_grouped_and_none_is_cut_off(call):
    status, out, err = call("--help")
    assert (status, err) == (0, "")
    assert titles(out) == ["Run", "Check", "Measure", "Simulate", "Learn", "Options"]
    assert "..." not in out.partition("Run:")[2]
    shown = dict(re.findall(r"^  ([a-z-]+) +(\S.*)$", out.partition("Run:")[2], re.MULTILINE))
    assert set(NAMES) <= set(shown)
    for name in NAMES:
        assert shown[name] == summary(PROGRAM.commands[name].help)
        assert len(shown[name]) <= 60
        assert shown[name].endswith(".")


@pytest.mark.parametrize("arguments", [(), ("--help",), *((name, "--help") for name in NAMES)])
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
    assert text.startswith(f"  {summary(PROGRAM.commands[name].help)}\n\n")
    assert 0 < text.index("  Exit status: 0 ") < text.index("  Example")
    assert call(name, "-h") == (0, out, "")


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_shown_once_in_a_known_group(call, name):
    _, out, _ = call(name, "--help")
    out = out.partition("  Example")[2]
    for param in options_of(name):
        assert param.rich_help_panel in OPTION_GROUPS
        assert len(re.findall(rf"^  {param.opts[0]}( |$)", out, re.MULTILINE)) == 1
        assert param.help.endswith((".", "]"))
    order = [COMMON, *OPTION_GROUPS, "Other"]
    groups = [title for title in titles(out) if title in order]
    assert groups == sorted(groups, key=order.index)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_range(call, name):
    _, out, _ = call(name, "--help")
    for option in re.findall(r"^  (--\S+) (?:INTEGER|FLOAT)\b", out, re.MULTILINE):
        (param,) = (param for param in options_of(name) if option in param.opts)
        assert re.search(r"\[[^\]]*(at least|above|\d to) [^\]]*\]$", param.help), option


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_commands_of_the_program(name):
    examples = re.findall(r"^ +specsim (.*)$", PROGRAM.commands[name].help, re.MULTILINE)
    assert examples
    for example in examples:
        command, *words = shlex.split(example)
        assert command == name
        PROGRAM.commands[name].make_context(name, words)  # fails for an option that the command does not have


def test_generate_shows_its_ten_common_options_first(call):
    _, out, _ = call("generate", "--help")
    common = out.partition(f"{COMMON}:\n")[2].partition("\n\n")[0]
    shown = re.findall(r"^  --([a-z-]+)", common, re.MULTILINE)
    assert [name.replace("-", "_") for name in shown] == [*GenerateHelp.common[:-1], "json"]
    assert len(shown) == 10
    assert titles(out)[1 if titles(out)[0] == "Examples" else 0] == COMMON


def test_a_default_and_a_range_share_a_bracket(call):
    _, out, _ = call("generate", "--help")
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
    shown = " ".join(call("simulate", "--help")[1].split()).split(before)[1]
    listed = re.split(r"[;.] ", shown)[0]
    assert sorted(re.split(", | or ", listed)) == sorted(names)
