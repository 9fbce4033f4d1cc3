"""No output of a command overwrites its inputs or its other outputs, and every option says which it is."""

import sys
from collections.abc import Iterator
from itertools import permutations, product
from pathlib import Path

import pytest

from specsim.cli.main import FUNCTIONS, command
from specsim.core.errors import InputError

TEXTS = {  # options with a text that names no file
    "accept_lengths", "accept_rates", "api_key_variable", "case", "cell", "cluster", "draft_field", "efficiency",
    "host", "layout", "name", "only", "ops", "output", "output_tokens", "program", "prompt", "prompt_tokens", "regex",
    "shard", "slo", "suite", "table", "url", "url_plain", "verifier",
}  # fmt: skip
NAMES = {  # the same of single commands
    ("diff", "drafter"), ("diff", "family"), ("parity", "text"), ("parity", "drafter"), ("plan", "draft"),
    ("probe", "model"),
}  # fmt: skip


def words(name: str, role: str) -> Iterator[list[str]]:
    """List the words before the value of each option of a role: its name, none for an argument."""
    for field in command(name).all_fields.values():
        if field.option.file == role:
            yield [] if field.option.is_argument else [field.label]


def parse(name: str, *arguments: str) -> None:
    command(name).make_context(name, list(map(str, arguments)))


PAIRS = [
    (name, first, second)
    for name in FUNCTIONS
    for first, second in (
        *product(words(name, "reads"), words(name, "writes")),
        *permutations(words(name, "writes"), 2),
    )
]


def test_every_text_says_whether_it_names_a_file():
    for name in FUNCTIONS:
        for field in command(name).fields.values():
            is_text = field.kind is str and (field.choices or field.name in TEXTS or (name, field.name) in NAMES)
            is_file = bool(field.option.file)
            assert is_file != (bool(is_text) or field.kind not in (str, Path)), f"{name} {field.name}: a file?"
            is_output = is_file and field.option.group == "Output"
            assert (field.option.file in ("writes", "folder")) == is_output


def test_many_pairs_are_tested():
    assert len(PAIRS) > 100
    assert {name for name, *_ in PAIRS} == FUNCTIONS.keys() - {"demo", "schema"}


@pytest.mark.parametrize("link", ["itself", "symlink", "hard link", "detour"])
def test_no_output_is_another_file_of_its_command(link, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file, other = tmp_path / "file", tmp_path / "folder" / "other"
    file.write_text("# before")
    other.parent.mkdir()
    if link == "symlink":
        other.symlink_to(file)
    if link == "hard link":
        other.hardlink_to(file)
    other = {"itself": file, "detour": Path("folder/../file")}.get(link, other)
    for name, first, second in PAIRS:
        for arguments in ((*first, file, *second, other), (*second, other, *first, file)):
            with pytest.raises(InputError) as raised:
                parse(name, *arguments)
            both = {f"--{raised.value.name.replace('_', '-')}", raised.value.allowed.split()[-1].rstrip(".")}
            assert both == {*(first or ["FILE"]), *second}
    assert file.read_text() == "# before"


def test_two_new_outputs_are_different_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, first, second in PAIRS:
        if (name, second, first) in PAIRS:
            with pytest.raises(InputError):
                parse(name, *first, "new", *second, tmp_path / "new")


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
    name, *others = arguments.split()
    with pytest.raises(InputError, check=lambda error: error.name == "json"):
        parse(name, "--json", output, *others)


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
    for name in FUNCTIONS:
        for option in words(name, "writes"):
            with pytest.raises(InputError) as raised:
                parse(name, *option, path)
            assert option == [f"--{raised.value.name.replace('_', '-')}"]


def test_a_new_folder_is_no_input(tmp_path):
    for option in ("--target", "--draft"):
        with pytest.raises(InputError, check=lambda error: error.name == "to"):
            parse("convert", option, tmp_path, "--to", tmp_path)
