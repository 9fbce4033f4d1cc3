"""Heads are written in both layouts and read back equal, or nothing is written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specsim.cli.main import main
from specsim.core.errors import InputError
from specsim.core.pair import DrafterCheckpoint
from specsim.models.checkpoint import load_drafter, load_target
from specsim.models.checkpoint.head_files import head_fields, head_tensors
from specsim.models.convert import convert
from specsim.models.shipped import TINY
from specsim.models.synthetic_pair import synthetic_pair

TARGET = TINY / "target"
HEAD = TINY / "eagle3"


def same(first: DrafterCheckpoint, second: DrafterCheckpoint) -> bool:
    assert first.config == second.config
    assert first.tensors.keys() == second.tensors.keys()
    return all(
        tensor.dtype == second.tensors[name].dtype and torch.equal(tensor, second.tensors[name])
        for name, tensor in first.tensors.items()
    )


def folder_of(path: Path, head: DrafterCheckpoint, layout: str, **changes: Any) -> Path:
    """Write a head without the check, in float32."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(head_fields(head.config, layout) | changes))
    tensors = {name: each.contiguous().clone() for name, each in head_tensors(head, layout).items()}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_the_shipped_head_reads_back_equal(layout: str, tmp_path: Path):
    done = convert(TARGET, HEAD, tmp_path / "new", layout)
    model = load_target(TARGET).config
    assert same(load_drafter(HEAD, model), load_drafter(tmp_path / "new", model))
    fields = json.loads((tmp_path / "new" / "config.json").read_text())
    assert ("transformer_layer_config" in fields) is (layout == "speculators")
    assert (done.layout, done.config.kind) == (layout, "eagle3")
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kind", ["eagle3", "eagle3.1", "p-eagle"])
def test_every_kind_goes_there_and_back(kind: str, window: int | None, tmp_path: Path):
    """EAGLE layout, then speculators, then EAGLE again: the first and the last folder have equal files."""
    pair = synthetic_pair(kind, num_layers=4)
    layer = pair.drafter.config.model.with_windows((window,) * pair.drafter.config.model.num_layers)
    head = replace(pair.drafter, config=replace(pair.drafter.config, model=layer, norm_before_residual=True))
    target = tmp_path / "target"
    target.mkdir()
    model = pair.target.config
    sizes = ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings", "num_heads", "num_kv_heads")
    names = dict(num_heads="num_attention_heads", num_kv_heads="num_key_value_heads")
    fields = {names.get(name, name): getattr(model, name) for name in sizes}
    fields |= {"model_type": "llama", "num_hidden_layers": 4, "intermediate_size": model.mlp.size}
    (target / "config.json").write_text(json.dumps(fields | {"head_dim": model.head_dim}))
    first = folder_of(tmp_path / "first", head, "eagle")
    convert(target, first, tmp_path / "second", "speculators")
    convert(target, tmp_path / "second", tmp_path / "third", "eagle")
    assert (first / "config.json").read_text() != (tmp_path / "second" / "config.json").read_text()
    assert json.loads((first / "config.json").read_text()) == json.loads(
        (tmp_path / "third" / "config.json").read_text()
    )
    assert same(head, load_drafter(tmp_path / "third", model))


@pytest.mark.parametrize(
    ("draft", "layout", "name"),
    [("eagle", "eagle", "draft"), ("mtp", "speculators", "draft"), ("eagle3", "vllm", "layout")],
)
def test_what_cannot_be_written_is_refused(draft: str, layout: str, name: str, tmp_path: Path):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        convert(TARGET, TINY / draft, tmp_path / "new", layout)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_kept(tmp_path: Path):
    with pytest.raises(InputError, check=lambda error: error.name == "to"):
        convert(TARGET, HEAD, tmp_path, "eagle")
    with pytest.raises(InputError, check=lambda error: error.name == "to"):
        convert(TARGET, HEAD, tmp_path / "no" / "new", "eagle")


def test_a_head_that_reads_back_otherwise_leaves_nothing(tmp_path: Path, monkeypatch):
    def wrong(checkpoint: DrafterCheckpoint, layout: str) -> dict[str, torch.Tensor]:
        tensors = head_tensors(checkpoint, layout)
        return tensors | {"norm.weight": tensors["norm.weight"] + 1}

    monkeypatch.setattr("specsim.models.convert.head_tensors", wrong)
    with pytest.raises(InputError, check=lambda error: error.name == "layout"):
        convert(TARGET, HEAD, tmp_path / "new", "speculators")
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_it_wrote(tmp_path: Path, capsys):
    arguments = ["convert", "--target", str(TARGET), "--draft", str(HEAD), "--layout", "speculators"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--to", str(tmp_path / "new")])
    assert ended.value.code == 0
    assert "eagle3 head of" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--to", str(tmp_path / "new")])
    assert ended.value.code == 2
    assert "to is" in capsys.readouterr().err
