"""Drafters on the target's KV, under the names of Gemma 4's assistants (transformers, models/gemma4_assistant).

Tensors: pre_projection [H, 2 · target H] in the order embedding, hidden state, layers.i.* with queries only, norm,
post_projection [target H, H], lm_head.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from specsim.core.errors import InputError, require
from specsim.core.frozen_kv import FrozenKVConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import DrafterFormat, DrafterLayout
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import Layout, attention_layout, mlp_layout, norm_layout
from specsim.models.checkpoint.model_config import decoder_config
from specsim.models.checkpoint.weights import Stored, by_name, check_layout

_QUERY = ("q_proj", "q_norm", "o_proj", "sinks")  # parts of an attention without keys and values
_PARTS = (
    r"(pre_projection|post_projection|lm_head|norm|layers\.\d+\.(input_layernorm|post_attention_layernorm"
    r"|self_attn\.(q_proj|q_norm|o_proj)|mlp\.(gate|up|down)_proj))\.(weight|bias)"
)


def _matches(fields: Fields, names: Collection[str], is_wanted: bool) -> bool:
    """Check for a second width or its projection; a head with a draft vocabulary is of another kind."""
    if fields.get("draft_vocab_size"):
        return False
    return bool(fields.get("backbone_hidden_size")) or "pre_projection.weight" in names


def _layout(config: FrozenKVConfig) -> DrafterLayout:
    """List the tensors of a drafter whose layers have queries only, as keys and values are the target's.

    pre_projection reads the target's embedding and hidden state, post_projection makes a hidden state of that width.
    """
    model = config.model
    width = model.hidden_size
    target_width = config.target_hidden_size
    layout: Layout = {"pre_projection.weight": (width, 2 * target_width), "norm.weight": (width,)}
    layout |= {"post_projection.weight": (target_width, width), "lm_head.weight": (config.draft_vocab_size, width)}
    for index, layer in enumerate(model.layers):
        name = f"layers.{index}"
        layout |= norm_layout(name, width, "input_layernorm", "post_attention_layernorm")
        attention = attention_layout(name, layer.attention, width, width)
        layout |= {key: shape for key, shape in attention.items() if key.split(".")[3] in _QUERY}
        layout |= mlp_layout(name, layer.mlp, width)
    return DrafterLayout(layout, {})


def _load(fields: Fields, stored: Iterable[Stored], target: ModelConfig) -> DrafterCheckpoint:
    named = by_name(stored, lambda key: key.removeprefix("model."))
    embedding = named.pop("embed_tokens.weight", None)
    if embedding and fields.flag("tie_word_embeddings", default=True):
        named.setdefault("lm_head.weight", embedding)
    for name, entry in named.items():
        if not re.fullmatch(_PARTS, name):
            allowed = "a drafter of layers as in Llama, Qwen3 and Mistral without keys and values, with one head"
            raise InputError(f"{entry.key} in {entry.file}", "a part of another kind of layer", allowed)
    config = _config(fields, target)
    return DrafterCheckpoint(config, check_layout(named, fields.file.parent, *_layout(config)))


def _config(fields: Fields, target: ModelConfig) -> FrozenKVConfig:
    file = fields.file
    width = fields.integer("backbone_hidden_size", default=target.hidden_size)
    allowed = f"{target.hidden_size}, the target's hidden_size"
    require(width == target.hidden_size, f"backbone_hidden_size in {file}", width, allowed)
    layer = fields.mapping("text_config") if fields.get("text_config") else fields
    heads = {"num_key_value_heads": target.num_kv_heads, "head_dim": target.head_dim}
    model = decoder_config(layer.filled(heads), target)
    target_values = _shared(target)
    for name, value in _shared(model).items():
        require(value == target_values[name], f"{name} in {file}", value, f"{target_values[name]}, the target's")
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


FORMAT = DrafterFormat(precedence=3, matches=_matches, load=_load, layout=_layout)
