"""No output of a command overwrites its inputs or its other outputs, and every option says which it is."""

import re
import sys
from collections.abc import Callable, Iterator
from inspect import signature
from itertools import permutations, product
from pathlib import Path
from typing import get_args

import pytest
import typer.main

from specsim.cli.file_options import reads, writes, writes_folder
from specsim.cli.main import COMMANDS, app
from specsim.core.errors import InputError

FUNCTIONS = {each.__name__.replace("_", "-"): each for group in COMMANDS.values() for each in group}
PROGRAM = typer.main.get_command(app)
TEXTS = {  # parameters with a text that names no file
    "accept_lengths", "accept_rates", "cell", "cluster", "draft_field", "efficiency", "name", "only", "ops", "output",
    "output_tokens", "program", "prompt", "prompt_tokens", "regex", "shard", "slo", "suite", "table", "verifier",
}  # fmt: skip
NAMES = {("diff", "drafter"), ("diff", "family"), ("plan", "draft")}  # the same of single commands


def text_parameters(command: str) -> Iterator[tuple[str, object]]:
    """List the parameters of a command that take a text or a path, with their option or argument."""
    for name, parameter in signature(FUNCTIONS[command]).parameters.items():
        kind, declared = get_args(parameter.annotation)
        if {str, Path, list[str], list[Path]} & {kind, *get_args(kind)}:
            yield name, declared


def words(command: str, role: Callable) -> Iterator[list[str]]:
    """List the words before the value of each parameter of a role: an option's name, none for an argument."""
    options = {each.name: each.opts for each in PROGRAM.commands[command].params if each.param_type_name == "option"}
    for name, declared in text_parameters(command):
        if declared.callback is role:
            yield options.get(name, [])


def parse(command: str, *arguments: str) -> None:
    PROGRAM.commands[command].make_context(command, list(map(str, arguments)))


PAIRS = [
    (command, first, second)
    for command in FUNCTIONS
    for first, second in (
        *product(words(command, reads), words(command, writes)),
        *permutations(words(command, writes), 2),
    )
]


def test_every_text_says_whether_it_names_a_file():
    for command in FUNCTIONS:
        for name, declared in text_parameters(command):
            is_choice = re.fullmatch(r"[a-z0-9_-]+(\|[a-z0-9_-]+)*", declared.metavar or "")
            is_text = bool(is_choice) or name in TEXTS or (command, name) in NAMES
            is_file = declared.callback in (reads, writes, writes_folder)
            assert is_file != is_text, f"{command} {name}: reads, writes, or in the list above?"
            assert (declared.callback in (writes, writes_folder)) == (is_file and declared.rich_help_panel == "Output")


def test_many_pairs_are_tested():
    assert len(PAIRS) > 100
    assert {command for command, *_ in PAIRS} == FUNCTIONS.keys() - {"convert", "demo", "schema", "faults", "train"}


@pytest.mark.parametrize("link", ["itself", "symlink", "hard link", "detour"])
def test_no_output_is_another_file_of_its_command(link, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, other = tmp_path / "file", tmp_path / "folder" / "other"
    file.write_text("before")
    other.parent.mkdir()
    if link == "symlink":
        other.symlink_to(file)
    if link == "hard link":
        other.hardlink_to(file)
    other = {"itself": file, "detour": Path("folder/../file")}.get(link, other)
    for command, first, second in PAIRS:
        for arguments in ((*first, file, *second, other), (*second, other, *first, file)):
            with pytest.raises(InputError) as raised:
                parse(command, *arguments)
            both = {f"--{raised.value.name.replace('_', '-')}", raised.value.allowed.split()[-1].rstrip(".")}
            assert both == {*(first or ["FILE"]), *second}
    assert file.read_text() == "before"


def test_two_new_outputs_are_different_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command, first, second in PAIRS:
        if (second, first) in [(one, two) for name, one, two in PAIRS if name == command]:
            with pytest.raises(InputError):
                parse(command, *first, "new", *second, tmp_path / "new")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ("generate --rule rule.py:rule", "rule.py"),
        ("generate --rule rule:rule", "rule.py"),
        ("generate --rule folder.rule:rule", "folder/rule.py"),
        ("generate --rule package:rule", "package/__init__.py"),
        ("generate --rule elsewhere:rule", "path/elsewhere.py"),
        ("generate --target checkpoint", "checkpoint/config.json"),
        ("generate --target checkpoint", "blob"),
        ("accept --drafter eagle3 --drafter rule.py:Drafter", "rule.py"),
        ("certify --module rule.py", "rule.py"),
        ("conformance --module rule", "rule.py"),
        ("simulate --hardware gpus.csv#H100", "gpus.csv"),
        ("simulate --model ~/config.json", "config.json"),
        ("plan --acceptance record.json#2", "record.json"),
        ("sweep --vary seed=1,2 --vary hardware=H100,gpus.csv", "gpus.csv"),
        ("calibrate record.json gpus.csv", "gpus.csv"),
    ],
)
def test_a_file_inside_a_value_is_protected(arguments, output, tmp_path, monkeypatch):
    files = "rule.py folder/rule.py package/__init__.py path/elsewhere.py checkpoint/config.json gpus.csv record.json"
    for name in (*files.split(), "blob", "config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "checkpoint" / "model.safetensors").symlink_to(tmp_path / "blob")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "path")])
    command, *others = arguments.split()
    with pytest.raises(InputError, check=lambda error: error.name == "json"):
        parse(command, "--json", output, *others)


def test_a_new_file_beside_the_inputs_can_be_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "checkpoint").mkdir()
    parse("generate", "--target", "checkpoint", "--json", "checkpoint/new.json", "--prompt", "a=b,c", "--draft", "")
    parse("explain", "--a", "a.json", "--b", "a.json", "--json", "c.json")
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint"]


@pytest.mark.parametrize("path", ["", "missing/file", "file/below", "/dev/full", "a" * 300])
def test_an_output_that_cannot_be_written_is_found_at_once(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    for command in FUNCTIONS:
        for option in words(command, writes):
            with pytest.raises(InputError) as raised:
                parse(command, *option, path)
            assert option == [f"--{raised.value.name.replace('_', '-')}"]


def test_a_new_folder_is_no_input(tmp_path):
    for option in ("--target", "--draft"):
        with pytest.raises(InputError, check=lambda error: error.name == "to"):
            parse("convert", option, tmp_path, "--to", tmp_path)
