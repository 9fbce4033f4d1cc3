"""Files of options: what --save-config writes --config reads, and a bad file is one sentence."""

import json
import tomllib
from pathlib import Path

import pytest

from specsim.cli.config_file import read_config, write_config
from specsim.cli.convert import ConvertOptions
from specsim.cli.generate import GenerateOptions
from specsim.cli.main import FUNCTIONS, command
from specsim.cli.option_fields import command_line

pytestmark = pytest.mark.usefixtures("shipped")
VALUES = {
    "prompt": 'a "b"\n\x7fé\\',
    "max_new_tokens": 4,
    "temperature": 0.5,
    "json": "out.json",
    "draft_field": ["a=1"],
}


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_saved_run_is_repeated(call, tmp_path, monkeypatch, suffix):
    monkeypatch.chdir(tmp_path)
    words = ("--temperature", "0.5", "--max-new-tokens", "4", "--json", "out.json", "--preset", "naive-eagle")
    file = f"run.{suffix}"
    status, _, _ = call("generate", *words, "--batch-invariant", "--impl", "fast", "--save-config", file)
    assert status == 0
    first = json.loads(Path("out.json").read_text())
    assert call("generate", "--config", file)[0] == 0
    second = json.loads(Path("out.json").read_text())
    names = ("command", "outputs", "config", "impl")
    assert [first[name] for name in names] == [second[name] for name in names]
    assert first["config"]["page_size"] == 1


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_file_gives_the_value_back(tmp_path, suffix):
    file = tmp_path / f"run.{suffix}"
    options = GenerateOptions(
        prompt=VALUES["prompt"],
        temperature=1e-5,
        top_p=0.9,
        json=Path("a/b"),
        draft_field=["a=1", "b=[2]"],
        graph="step",
    )
    write_config(file, options)
    assert GenerateOptions(**read_config(file, "generate", GenerateOptions)) == options
    values = (json.loads if suffix == "json" else tomllib.loads)(file.read_text(encoding="utf-8"))
    assert values["prompt"] == VALUES["prompt"]


def test_every_option_can_be_in_a_file(tmp_path):
    """Each field reads a value of its type, and the command line of a value gives the same value."""
    for name in FUNCTIONS:
        for field in command(name).fields.values():
            number = field.option.range.at_most or field.option.range.at_least or 1
            value = {bool: True, str: "x", Path: "x"}.get(field.kind, number)
            value = field.choices[0] if field.choices else value
            assert field.read([value] if field.is_list else value) is not None
    options = GenerateOptions(topk=1, num_steps=2, prompt="a b", draft_field=["a=1", "b=2"], batch_invariant=True)
    line = (
        "specsim generate --topk 1 --num-steps 2 --draft-field a=1 --draft-field b=2 --prompt 'a b' --batch-invariant"
    )
    assert set(command_line("generate", options).split(" --")) == set(line.split(" --"))


@pytest.mark.parametrize(
    ("text", "words", "sentence"),
    [
        (None, "", "config is '{file}'; allowed: a TOML file of options, or a .json file (No such file or directory)"),
        ("topk =", "", "config is '{file}'; allowed: a TOML file of options, or a .json file (Invalid value"),
        ("topk = 1\ntopk = 2", "", "config is '{file}'; allowed: a TOML file of options, or a .json file (Cannot "),
        ("tokp = 1", "", "key in {file} is 'tokp'; allowed: topk or top_p or top_k of specsim generate; --help-all"),
        ("max-new-tokens = 1", "", "key in {file} is 'max-new-tokens'; allowed: max_new_tokens"),
        ("max_running = 1", "", "key in {file} is 'max_running'; allowed: "),
        ("config = 'x'", "", "key in {file} is 'config'; allowed: "),
        ("[sampling]\ntop_k = 1", "", "key in {file} is 'sampling'; allowed: "),
        ("topk = '1'", "", "topk is '1'; allowed: an integer (in {file})"),
        ("topk = true", "", "topk is True; allowed: an integer (in {file})"),
        ("temperature = 'warm'", "", "temperature is 'warm'; allowed: a number (in {file})"),
        ("impl = 1", "", "impl is 1; allowed: reference or fast (in {file})"),
        ("batch_invariant = 1", "", "batch_invariant is 1; allowed: true or false (in {file})"),
        ("draft_field = 'a=1'", "", "draft_field is 'a=1'; allowed: a list, each entry a text (in {file})"),
        ("draft_field = [1]", "", "draft_field is 1; allowed: a text (in {file})"),
        ("num_steps = -1", "", "num_steps is -1; allowed: an integer from 0 to 1024 (in {file})"),
        ("top_p = 0", "", "top_p is 0.0; allowed: a number above 0 and at most 1 (in {file})"),
        ("seed = -1", "", "seed is -1; allowed: an integer from 0 to 2^64 - 1 (in {file})"),
        ("preset = 'medusa'", "", "preset is 'medusa'; allowed: naive-eagle (in {file})"),
        ("topk = 1", "--topk 1", "topk is 1; allowed: nothing where {file} has it: leave out --topk or that key"),
        ("json = 'a'", "--json b", "json is 'b'; allowed: nothing where {file} has it: leave out --json or that key"),
        ("json = '{file}'", "", "json is '{file}'; allowed: another file than that of --config"),
        ("", "--json {file}", "json is '{file}'; allowed: another file than that of --config"),
        ("", "--save-config {file}", "save_config is '{file}'; allowed: another file than that of --config"),
        ("", "--prompt-file {tmp}/text --save-config {tmp}/text", "save_config is '{tmp}/text'; allowed: another file"),
        ("", "--json {tmp}/new --save-config {tmp}/new", "save_config is '{tmp}/new'; allowed: another file"),
        ("", "--save-config {tmp}/missing/new", "save_config is "),
    ],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(call, bad_files, assert_one_sentence, text, words, sentence):
    file = bad_files / "run.toml"
    if text is not None:
        file.write_text(text.replace("{file}", str(file)))
    before = {path: path.read_bytes() for path in bad_files.rglob("*") if path.is_file()}
    filled = [word.format(tmp=bad_files, file=file) for word in words.split()]
    result = call("generate", "--config", str(file), *filled)
    assert_one_sentence(result)
    assert result[2].startswith(f"specsim: {sentence.format(file=file, tmp=bad_files)}")
    assert {path: path.read_bytes() for path in bad_files.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("text", ["[1]", '{"topk": 1, "topk": 2}', "{"])
def test_a_bad_json_file_is_one_sentence(call, tmp_path, assert_one_sentence, text):
    (tmp_path / "run.json").write_text(text)
    assert_one_sentence(call("generate", "--config", str(tmp_path / "run.json")), "config")
    assert_one_sentence(call("generate", "--config", str(tmp_path)), "config")


def test_a_file_has_what_is_required(call, tmp_path, assert_one_sentence):
    file = tmp_path / "convert.toml"
    file.write_text("target = 'a'\ndraft = 'b'\nlayout = 'eagle'\n")
    assert_one_sentence(call("convert", "--config", str(file)), "Missing option")
    options = ConvertOptions(target="a", draft="b", to=Path("c"), layout="eagle")
    file.write_text(file.read_text() + "to = 'c'")
    assert ConvertOptions(**read_config(file, "convert", ConvertOptions)) == options
    (tmp_path / "report.toml").write_text(f"file = '{tmp_path}/missing'")
    assert_one_sentence(call("lint-report", "--config", str(tmp_path / "report.toml")), "file")
