"""Models and GPUs by their common names."""

import json
from pathlib import Path

import pytest

from specsim.core.errors import InputError
from specsim.simulator import hardware, model
from specsim.simulator.model import read_config


def test_an_error_names_the_file_of_a_config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(InputError, check=lambda error: error.name == "hidden_size" and str(path) in str(error)):
        model(path)


@pytest.mark.parametrize(
    ("written", "shape"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("LLAMA-3-70B", "llama-3-70b"),
    ],
)
def test_a_hub_id_is_the_shipped_model_of_its_shape(written, shape):
    assert model(written) == model(shape)


@pytest.mark.parametrize(
    "written", ["Qwen/Qwen3-8B-FP8", "Qwen/Qwen3-14B", "mistralai/Mistral-7B-v0.3", "org/", "/", ""]
)
def test_a_hub_id_of_another_shape_is_refused(written):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("model", written)):
        model(written)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"hidden_size": 4,', "no JSON"),
        (b"\xff", "invalid start byte"),
        (b"[1]", "holds a JSON object"),
        (None, "folder"),
    ],
)
def test_a_broken_file_is_said_and_no_list_of_names(tmp_path, content, reason):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=reason) as refused:
        model(tmp_path if content is None else path)
    assert refused.value.name == "model"
    assert "llama" not in str(refused.value)


def test_an_unreadable_file_is_said(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.touch()

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match="Permission denied"):
        model(path)


def test_a_folder_goes_before_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    shape = read_config("llama-3-8b")[1]
    (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 3}))
    assert model("Qwen/Qwen3-8B").num_layers == 3


def test_a_gpu_is_found_by_the_beginning_of_one_name():
    assert [hardware(name).name for name in ("H100", "h20", "A100-80GB", "rtx-4090")] == [
        "H100-SXM",
        "H20",
        "A100-80GB-SXM",
        "RTX-4090",
    ]
    with pytest.raises(InputError, match="hardware is 'A100'; allowed: A100-40GB-SXM or A100-80GB-SXM"):
        hardware("A100")


@pytest.mark.parametrize(("make", "name"), [(hardware, "name"), (model, "source")])
@pytest.mark.parametrize("value", [None, 3, b"H100"])
def test_a_name_that_is_no_text_is_refused(make, name, value):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        make(value)
