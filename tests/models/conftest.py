"""Checkpoints of published layouts, shrunk and filled at random."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specsim.core.target import ModelConfig
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.model_config import model_config

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I64": torch.int64, "BOOL": torch.bool}
# num_attention_heads to head_dim: 4 heads of 6 (wider ones as published), hidden 24; other sizes in proportion.
TINY = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "head_dim": 6,
    "draft_vocab_size": 14,
}
Tensors = dict[str, torch.Tensor]


class Published:
    """Published configs and layouts by name, and tiny checkpoints like them."""

    def __init__(self) -> None:
        paths = (Path(__file__).parent / "manifests").glob("*.json")
        self.manifests: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in paths}

    def config(self, name: str) -> dict[str, Any]:
        """Read the fields of a published config.json, with tiny sizes."""
        return shrink(self.manifests[name]["config"])

    def tensors(self, name: str, seed: int = 0) -> Tensors:
        """Make random tensors with published keys and types, and a tiny size for every size."""
        manifest = self.manifests[name]
        generator = torch.Generator().manual_seed(seed)
        to_tiny: dict[int, int] = {}
        for size, tiny in zip(sizes(manifest["config"]), sizes(self.config(name)), strict=True):
            assert to_tiny.setdefault(size, tiny) == tiny
        tensors = {}
        for key, entry in manifest["tensors"].items():
            shape = [to_tiny[size] for size in entry["shape"]]
            tensors[key] = torch.randn(shape, generator=generator).to(DTYPES[entry["dtype"]])
        return tensors | (self.vocabulary() if "d2t" in tensors else {})

    def vocabulary(self) -> Tensors:
        """Map draft ids 0..13 to the target ids 3, 5, 7, ..."""
        ids = torch.arange(TINY["draft_vocab_size"]) * 2 + 3
        t2d = torch.zeros(TINY["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
        return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}

    def write(self, folder: Path, name: str, form: str = "model.safetensors", **changes: Any) -> tuple[Path, Tensors]:
        """Write a tiny checkpoint like a published one.

        changes: fields of its config.
        """
        tensors = self.tensors(name)
        return self.save(folder, self.config(name) | changes, tensors, form), tensors

    def save(self, folder: Path, config: dict[str, Any], tensors: Tensors, form: str = "model.safetensors") -> Path:
        """Write a checkpoint folder in one of the four formats, in three shards where it has an index."""
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        if not form.endswith(".index.json"):
            save(tensors, folder / form)
            return folder
        stem, suffix = form.removesuffix(".index.json").rsplit(".", 1)
        weight_map = {}
        for shard in range(3):
            part = dict(list(tensors.items())[shard::3])
            name = f"{stem}-{shard + 1:05d}-of-00003.{suffix}"
            save(part, folder / name)
            weight_map |= dict.fromkeys(part, name)
        (folder / form).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    def target(self, num_layers: int = 36) -> ModelConfig:
        """Make the tiny config of a target that every published head fits, with hidden 24."""
        changes = {"num_hidden_layers": num_layers, "max_position_embeddings": 99}
        changes |= {"rope_theta": 5e5, "rms_norm_eps": 1e-5}
        return model_config(Fields(Path("target"), self.small("llama", **changes)))

    def small(self, family: str, **fields: Any) -> dict[str, Any]:
        """Make the fields of a config.json of four layers."""
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
        return TINY | heads | {"model_type": family, "rms_norm_eps": 1e-6, "max_position_embeddings": 64} | fields


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """Make sizes tiny and keep the rest as published, with the same share of KV heads."""
    tiny = {name: TINY.get(name, value) if value is not None else None for name, value in config.items()}
    if tiny.get("head_dim"):
        tiny["head_dim"] *= config["num_attention_heads"] * config["head_dim"] // config["hidden_size"]
    if "num_key_value_heads" in config:
        grouped = config["num_key_value_heads"] < config["num_attention_heads"]
        tiny["num_key_value_heads"] = 2 if grouped else TINY["num_attention_heads"]
    if "transformer_layer_config" in config:
        tiny["transformer_layer_config"] = shrink(config["transformer_layer_config"])
    return tiny


def sizes(config: dict[str, Any]) -> list[int]:
    """List every size that a tensor of this config's checkpoint can have, in a fixed order."""
    config = config | config.get("transformer_layer_config", {})
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head_dim
    num_features = len(config.get("eagle_aux_hidden_state_layer_ids") or range(3))
    fused = [2 * hidden, num_features * hidden] if config["num_hidden_layers"] == 1 else []
    fixed = [config["vocab_size"], config["intermediate_size"], hidden, heads * head_dim, kv, head_dim, *fused]
    return [*fixed, config.get("draft_vocab_size", config["vocab_size"])]


def save(tensors: Tensors, file: Path) -> None:
    if file.suffix == ".safetensors":
        save_file(tensors, file)
    else:
        torch.save(tensors, file)


@pytest.fixture(scope="session")
def published() -> Published:
    return Published()
