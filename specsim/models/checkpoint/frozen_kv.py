"""Drafters on the target's KV, under the names of Gemma 4's assistants (transformers, models/gemma4_assistant)."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specsim.core.errors import InputError, require
from specsim.core.frozen_kv import FrozenKVConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.inherited import decoder_config
from specsim.models.checkpoint.weights import Stored, by_name

_PARTS = (
    r"(pre_projection|post_projection|lm_head|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm"
    r"|self_attn\.(q_proj|q_norm|o_proj)|mlp\.(gate|up|down)_proj))\.(weight|bias)"
)


def read_frozen_kv(
    fields: Fields, stored: Iterable[Stored], target: ModelConfig
) -> tuple[FrozenKVConfig, dict[str, Stored]]:
    """Read the shape of a drafter on frozen KV, and its tensors under our names."""
    named = by_name(stored, lambda key: key.removeprefix("model."))
    embedding = named.pop("embed_tokens.weight", None)
    if embedding and fields.flag("tie_word_embeddings", default=True):
        named.setdefault("lm_head.weight", embedding)
    for name, entry in named.items():
        if not re.fullmatch(_PARTS, name):
            allowed = "a drafter of layers as in Llama, Qwen3 and Mistral without keys and values, with one head"
            raise InputError(f"{entry.key} in {entry.file}", "a part of another kind of layer", allowed)
    return _config(fields, target), named


def _config(fields: Fields, target: ModelConfig) -> FrozenKVConfig:
    file = fields.file
    width = fields.integer("backbone_hidden_size", default=target.hidden_size)
    allowed = f"{target.hidden_size}, the target's hidden_size"
    require(width == target.hidden_size, f"backbone_hidden_size in {file}", width, allowed)
    layer = fields.mapping("text_config") if fields.get("text_config") else fields
    heads = {"num_key_value_heads": target.num_kv_heads, "head_dim": target.head_dim}
    model = decoder_config(layer.filled(heads), target)
    own = _shared(target)
    for name, value in _shared(model).items():
        require(value == own[name], f"{name} in {file}", value, f"{own[name]}, the target's")
    of_target = set(target.sliding_windows)
    for window in model.sliding_windows:
        require(
            window in of_target, f"sliding_window in {file}", window, f"a window of the target: {_listed(of_target)}"
        )
    model = replace(model, tie_word_embeddings=False, eos_token_ids=())
    position = fields.choice("position", ("last", "next"), default="last")
    return FrozenKVConfig(model, model.vocab_size, width, position="last" if position == "last" else "next")


def _shared(model: ModelConfig) -> dict[str, Any]:
    """List what drafter and target have in common, by the names of config.json."""
    return {
        "vocab_size": model.vocab_size,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rope_theta": model.rope.theta,
        "rope_scaling": model.rope.scaling,
    }


def _listed(windows: set[int | None]) -> str:
    return " or ".join("none" if window is None else str(window) for window in windows)
