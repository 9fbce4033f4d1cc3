"""Sizes and windows of a drafter's layers, written to a config.json or read from it."""

from collections.abc import Mapping
from typing import Any

from specsim.core.errors import InputError
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.fields import Fields

_BY_FLAG = ("qwen2", "qwen3")  # families whose windows `use_sliding_window` switches off


def layer_fields(model: ModelConfig) -> dict[str, Any]:
    """List the sizes of a drafter's layers, of the family that they have."""
    windows = {window for window in model.sliding_windows if window is not None}
    if len(windows) > 1:
        raise InputError("sliding_window", sorted(windows), "one window in all layers that have any")
    heads = model.heads
    fields: dict[str, Any] = {
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp.size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "attention_bias": heads.bias,
        "mlp_bias": model.mlp.bias,
        "tie_word_embeddings": model.tie_word_embeddings,
        "rope_theta": model.rope.theta,
    }
    fields |= _optional("rope_scaling", dict(model.rope.scaling))
    fields |= _optional("eos_token_id", list(model.eos_token_ids))
    if windows:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in model.sliding_windows]
        fields |= {"sliding_window": windows.pop(), "use_sliding_window": True, "layer_types": kinds}
    return fields


def windows_of(layer: Fields, model: ModelConfig) -> tuple[int | None, ...]:
    """Read the window of each layer of a drafter, which only `layer_types` switches on."""
    num_layers = model.num_layers
    layer_types = layer.get("layer_types", [])
    sliding = "sliding_attention"
    if not isinstance(layer_types, list) or any(
        layer_type not in (sliding, "full_attention") for layer_type in layer_types
    ):
        raise layer.error("layer_types", f"a list of {sliding} or full_attention")
    is_on = model.family not in _BY_FLAG or layer.flag("use_sliding_window", default=bool(layer_types))
    if not layer_types and is_on and model.family in _BY_FLAG and layer.get("sliding_window") is not None:
        allowed = "a list, where use_sliding_window is true: without one, readers differ in the layers that slide"
        raise layer.error("layer_types", allowed)
    if sliding not in layer_types:
        return (None,) * num_layers
    if not is_on:
        raise layer.error("use_sliding_window", f"true, where layer_types has {sliding}")
    if len(layer_types) != num_layers:
        raise layer.error("layer_types", f"{num_layers} times {sliding} or full_attention")
    window = layer.integer("sliding_window")
    return tuple(window if layer_type == sliding else None for layer_type in layer_types)


def _optional(name: str, value: Mapping[str, Any] | list[Any]) -> dict[str, Any]:
    return {name: value} if value else {}
