"""Damaged, incomplete and unreachable checkpoints raise errors that name the wrong field or file."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specsim.core.errors import InputError
from specsim.models.checkpoint import load_drafter, load_target, locate
from specsim.models.load import load
from specsim.models.shipped import TINY

EAGLE = "eagle-llama2-chat-7b"
EAGLE3 = "eagle3-llama3.1-instruct-8b"
FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
Tensors = dict[str, torch.Tensor]


class Anything:
    """A value that is not a tensor."""


def cut(file: str, share: float = 0.5) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / file).read_bytes()
        (folder / file).write_bytes(data[: int(len(data) * share)])

    return damage


def put(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content)


def drop(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def edit(change: Callable[[Tensors], Any]) -> Callable[[Path], None]:
    """Make a function that changes the tensors of a model.safetensors."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / FORMS[0])
        change(tensors)
        save_file(tensors, folder / FORMS[0])

    return damage


def pickled(content: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(content, folder / "pytorch_model.bin")


def reindex(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Make a function that changes the weight map of an index."""

    def damage(folder: Path) -> None:
        index = json.loads((folder / FORMS[1]).read_text())
        change(index["weight_map"])
        (folder / FORMS[1]).write_text(json.dumps(index))

    return damage


BAD = "not finite everywhere"
SHARD = "model-00002-of-00003.safetensors"
DAMAGE = [
    (FORMS[0], drop("config.json"), "head/config.json", "missing"),
    (FORMS[0], put("config.json", b'{"a": '), "head/config.json", ...),
    (FORMS[0], put("config.json", b"\xff"), "head/config.json", ...),
    (FORMS[0], put("config.json", b"[1]"), "head/config.json", "list"),
    (FORMS[0], drop(FORMS[0]), "the weights in head", "missing"),
    (FORMS[0], cut(FORMS[0]), "head/model.safetensors", ...),
    (FORMS[0], cut(FORMS[0], 0.01), "head/model.safetensors", ...),
    (FORMS[0], put(FORMS[0], b""), "head/model.safetensors", ...),
    (FORMS[1], drop(SHARD), f"head/{SHARD}", "missing"),
    (FORMS[1], cut(SHARD), f"head/{SHARD}", ...),
    (FORMS[1], put(FORMS[1], b"{}"), "weight_map in head/model.safetensors.index.json", {}),
    (FORMS[1], put(FORMS[1], b"{"), "head/model.safetensors.index.json", ...),
    (
        FORMS[1],
        reindex(lambda keys: keys.update({"fc.weight": "../" + SHARD})),
        "weight_map in head/model.safetensors.index.json",
        f"../{SHARD}",
    ),
    (FORMS[1], reindex(lambda keys: keys.update({"fc.bias": SHARD})), f"fc.bias in head/{SHARD}", "missing"),
    (FORMS[2], cut(FORMS[2]), "head/pytorch_model.bin", ...),
    (FORMS[2], put(FORMS[2], b""), "head/pytorch_model.bin", ...),
    (FORMS[2], put(FORMS[2], b"hello world"), "head/pytorch_model.bin", ...),
    (FORMS[2], pickled({"fc.weight": Anything()}), "head/pytorch_model.bin", "a pickle of more than tensors"),
    (FORMS[2], put(FORMS[2], pickle.dumps(Anything())), "head/pytorch_model.bin", ...),
    (FORMS[2], pickled([torch.ones(2)]), "head/pytorch_model.bin", "a pickle of something else"),
    (FORMS[2], pickled({"state_dict": {}}), "head/pytorch_model.bin", "a pickle of something else"),
    (FORMS[3], drop("pytorch_model-00003-of-00003.bin"), "head/pytorch_model-00003-of-00003.bin", "missing"),
    (FORMS[0], edit(lambda t: t.pop("midlayer.hidden_norm.weight")), "midlayer.hidden_norm.weight in head", "missing"),
    (FORMS[0], edit(lambda t: t.pop("d2t")), "d2t in head", "missing"),
    (FORMS[0], edit(lambda t: t.pop("fc.weight")), "fc.weight in head", "missing"),
    (
        FORMS[0],
        edit(lambda t: t.update({"fc.bias": torch.ones(24)})),
        "fc.bias in head/model.safetensors",
        "unexpected",
    ),
    (
        FORMS[0],
        edit(lambda t: t.update({"fc.weight": torch.ones(24, 48)})),
        "the shape of fc.weight in head/model.safetensors",
        [24, 48],
    ),
    (
        FORMS[0],
        edit(lambda t: t.update({"fc.weight": torch.ones(24, 72, dtype=torch.int8)})),
        "the dtype of fc.weight in head/model.safetensors",
        "torch.int8",
    ),
    *(
        (FORMS[0], edit(lambda t, v=value: t["fc.weight"][-1, -1].fill_(v)), f"fc.weight in head/{FORMS[0]}", BAD)
        for value in (torch.nan, -torch.inf)
    ),
    (
        FORMS[0],
        edit(lambda t: t.update({"model.fc.weight": torch.ones(24, 72)})),
        "fc.weight in head/model.safetensors",
        "the same tensor as model.fc.weight in model.safetensors",
    ),
    (FORMS[0], edit(lambda t: t["d2t"].__setitem__(13, 27)), "d2t[13] in head", 27),
    (FORMS[0], edit(lambda t: t["d2t"].__setitem__(2, -3)), "d2t[2] in head", -3),
    (FORMS[0], edit(lambda t: t["d2t"].__setitem__(1, 2)), "d2t[1] in head", 2),
    (FORMS[0], edit(lambda t: t["d2t"].__setitem__(slice(1, 3), torch.tensor([6, 3]))), "d2t[2] in head", 3),
    (FORMS[0], edit(lambda t: t["t2d"].__setitem__(3, False)), "t2d[3] in head", False),
    (FORMS[0], edit(lambda t: t["t2d"].__setitem__(0, True)), "t2d[0] in head", True),
    (
        FORMS[0],
        edit(lambda t: t.update({"d2t": t["d2t"].float()})),
        "the dtype of d2t in head/model.safetensors",
        "torch.float32",
    ),
]


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a head in the working directory."""
    monkeypatch.chdir(tmp_path)
    return Path("head")


@pytest.mark.parametrize(("form", "damage", "name", "value"), DAMAGE)
def test_damaged_checkpoints(form: str, damage: Callable[[Path], Any], name: str, value: Any, head: Path, published):
    published.write(head, EAGLE3, form)
    damage(head)
    with pytest.raises(InputError) as caught:
        load_drafter(head, published.target())
    assert caught.value.name == name
    assert value in (..., caught.value.value)
    assert "\n" not in str(caught.value)


def test_an_offset_out_of_order_is_one_sentence(head: Path, published):
    published.write(head, EAGLE3)
    edit(lambda t: t["d2t"].__setitem__(slice(1, 3), torch.tensor([6, 3])))(head)
    with pytest.raises(InputError) as caught:
        load_drafter(head, published.target())
    assert str(caught.value) == "d2t[2] in head is 3; allowed: an offset to a target id above 7, that of draft id 1"


@pytest.mark.parametrize(
    ("bias", "stored", "name", "value"),
    [
        (True, False, "fc.bias in head", "missing"),
        (False, True, "fc.bias in head/model.safetensors", "unexpected"),
        ("no", True, "bias in head/config.json", "no"),
    ],
)
def test_bias_of_eagle_fc_refused(bias: Any, stored: bool, name: str, value: str, head: Path, published):
    folder, tensors = published.write(head, EAGLE, bias=bias)
    if not stored:
        del tensors["fc.bias"]
        save_file(tensors, folder / FORMS[0])
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        load_drafter(head, published.target())


def test_a_folder_without_a_drafter(tmp_path: Path, published):
    folder = published.save(tmp_path, published.config("llama-3.1-8b-instruct"), {"lm_head.weight": torch.ones(40, 24)})
    with pytest.raises(InputError, check=lambda error: error.name == f"fc.weight in {folder}"):
        load_drafter(folder, published.target())


def test_an_untied_target_without_a_head(tmp_path: Path, published):
    folder, tensors = published.write(tmp_path, "qwen3-8b")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / FORMS[0])
    with pytest.raises(InputError, check=lambda error: error.name == f"lm_head.weight in {folder}"):
        load_target(folder)


@pytest.mark.parametrize("where", ["no such folder", "/nowhere/at/all", "./x", "file", "specsim/not-there"])
def test_places_that_cannot_be_reached(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The hub is offline under test, and its cache is empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    Path("file").touch()
    with pytest.raises(InputError) as caught:
        locate("target", where)
    assert (caught.value.name, caught.value.value) == ("target", where)
    assert ("can be reached" in caught.value.allowed) == (where == "specsim/not-there")  # that one is a hub id


def test_a_snapshot_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published):
    """Pickles are downloaded only where a repository has no safetensors."""
    folder, _ = published.write(tmp_path, EAGLE3, FORMS[2])
    asked = []

    def snapshot_download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns[-1]))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert load_drafter("someone/head", published.target()).config.kind == "eagle3"
    assert asked == [("someone/head", "model*.safetensors"), ("someone/head", "pytorch_model*.bin")]


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda t: {**t, 1: torch.ones(2)}, "{file}"),
        (lambda t: {**t, "norm.weight": torch.ones(256).to_sparse()}, "{file}"),
        (lambda t: {**t, "norm.weight": torch.full((256,), torch.nan)}, "norm.weight in {file}"),
    ],
    ids=["a key that is no name", "sparse", "nan"],
)
def test_tensors_that_cannot_be_weights(tmp_path: Path, damage: Callable, name: str):
    file = tmp_path / "pytorch_model.bin"
    (tmp_path / "config.json").write_bytes((TINY / "eagle3" / "config.json").read_bytes())
    torch.save(damage(load_file(TINY / "eagle3" / "model.safetensors")), file)
    with pytest.raises(InputError, check=lambda error: error.name == name.format(file=file)):
        load(TINY / "target", tmp_path)
