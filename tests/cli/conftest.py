"""Fixtures of the command line tests: a small pair instead of the shipped one, and files of bad input."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import save_file

import specsim.core.provenance
import specsim.models.shipped
from specsim.core.block import BlockDrafterConfig
from specsim.core.pair import Pair
from specsim.core.target import ModelConfig
from specsim.maintain.shipped_pair.prompts import save_tokenizer, train_tokenizer
from specsim.models.synthetic_pair import synthetic_pair

VOCAB_SIZE = 257
MAX_LEN = 512
KINDS = ("eagle", "eagle3", "p-eagle", "mtp", "frozen-kv", "dflash", "dspark", "standalone")
PROMPTS = ("def add(a, b):", "import os\n", "class Tree:\n    pass\n")
SHAPE = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256,
    "num_attention_heads": 4, "num_hidden_layers": 3, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 96,
}  # fmt: skip


def config_fields(config: ModelConfig) -> dict:
    return {
        "model_type": config.family, "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size, "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads, "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim, "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings, "rope_theta": config.rope.theta,
    }  # fmt: skip


def write_checkpoint(folder: Path, fields: dict, tensors: dict) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    stored = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")


def block_fields(config: BlockDrafterConfig) -> dict:
    """List the fields of a block drafter that no other has, as z-lab and DeepSpec name them."""
    block = config.block
    nested = {"mask_token_id": block.mask_token, "target_layer_ids": [layer - 1 for layer in config.feature_layers]}
    if config.kind == "dflash":
        return {"block_size": block.size, "dflash_config": nested}
    heads = {"markov_rank": block.markov_rank, "enable_confidence_head": True, "confidence_head_with_markov": True}
    return nested | heads | {"block_size": block.size, "num_anchors": 8}


def write_head(folder: Path, pair: Pair) -> None:
    config = pair.drafter.config
    fields = config_fields(config.model)
    if config.kind in ("eagle3", "p-eagle"):
        fields |= {"draft_vocab_size": config.draft_vocab_size, "eagle_aux_hidden_state_convention": "entering"}
        fields |= {"eagle_aux_hidden_state_layer_ids": list(config.feature_layers)}
    if config.kind == "p-eagle":
        fields |= {"mask_token_id": config.mask_token_id}
    if isinstance(config, BlockDrafterConfig):
        fields |= block_fields(config)
    if config.kind == "mtp":
        fields |= {"num_hidden_layers": 1, "num_nextn_predict_layers": config.num_modules}
    if config.kind == "frozen-kv":
        fields |= {"backbone_hidden_size": config.target_hidden_size}
    write_checkpoint(folder, fields, pair.drafter.tensors)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A folder like the shipped pair's: a target with its tokenizer, drafters, prompts and edits."""
    folder = tmp_path_factory.mktemp("zoo") / "tiny"
    heads = {kind: synthetic_pair(kind, num_layers=4, vocab_size=VOCAB_SIZE) for kind in KINDS}
    target = heads["eagle3"].target
    write_checkpoint(folder / "target", config_fields(target.config), target.tensors)
    save_tokenizer(train_tokenizer(["def"], VOCAB_SIZE), folder / "target", MAX_LEN)
    for kind, pair in heads.items():
        write_head(folder / kind, pair)
    lines = [json.dumps({"id": str(index), "text": text}) + "\n" for index, text in enumerate(PROMPTS)]
    for name in ("prompts", "edits"):
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def shipped(tiny, monkeypatch):
    monkeypatch.setattr(specsim.models.shipped, "TINY", tiny)


@pytest.fixture
def shape(tmp_path) -> Path:
    (tmp_path / "shapes").mkdir()
    (file := tmp_path / "shapes" / "small.json").write_text(json.dumps(SHAPE))
    return file


@pytest.fixture
def bad_files(tiny, tmp_path) -> Path:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("a text")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "latin1").write_bytes("é".encode("latin1"))
    write_head(tmp_path / "wider", synthetic_pair("eagle", vocab_size=VOCAB_SIZE, hidden_size=64))
    shutil.copytree(tiny / "target", tmp_path / "cut")
    os.truncate(tmp_path / "cut" / "model.safetensors", 1000)
    return tmp_path


@pytest.fixture
def assert_one_sentence() -> Callable[..., None]:
    """Check that a call ended in status 2 and one line on stderr that begins with the field."""

    def check(result: tuple[int, str, str], name: str = "") -> None:
        status, out, err = result
        assert (status, out) == (2, "")
        assert err.startswith(f"specsim: {name}{' ' * bool(name)}")
        assert err.count("\n") == 1

    return check


@pytest.fixture
def in_process(tiny) -> Callable[..., tuple[int, str]]:
    """Run the command line in a process of its own: (exit status, stderr)."""
    code = "import sys, pathlib, specsim.models.shipped\nspecsim.models.shipped.TINY = pathlib.Path(sys.argv.pop(1))\n"

    def run(*arguments: str, **options) -> tuple[int, str]:
        command = [sys.executable, "-c", f"{code}from specsim.cli.main import main\nmain()", str(tiny), *arguments]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, **options)
        return done.returncode, done.stderr

    return run
