"""Shape of a target, from a config.json of transformers 4 or 5."""

from dataclasses import replace
from pathlib import Path

from specsim.core.errors import InputError, require_choice
from specsim.core.layer_config import DenseMLP, HeadAttention, LayerConfig, Rope
from specsim.core.target import FAMILIES, ModelConfig
from specsim.models.checkpoint.fields import Fields, read_json

_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Defaults of transformers for absent fields; null ones have none. Sizes have no default.
_ABSENT = {
    "llama": {},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}


def read_target_config(folder: Path) -> ModelConfig:
    """Read the shape of a folder's target.

    End tokens of generation_config.json take precedence, as in transformers.
    """
    fields = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    ends = _end_tokens(read_json(generation)) if generation.exists() else ()
    return model_config(fields, ends or _end_tokens(fields))


def model_config(fields: Fields, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """Read the shape of a decoder from a config.json of transformers 4 or 5."""
    family = fields.choice("model_type", FAMILIES)
    fields.choice("hidden_act", ("silu",), default="silu")
    if fields.get("quantization_config"):
        raise fields.error("quantization_config", "none, as only floating-point weights are supported")
    fields = fields.filled(_ABSENT[family])
    num_heads = fields.integer("num_attention_heads")
    num_layers = fields.integer("num_hidden_layers")
    attention = _attention(family, fields, num_heads)
    mlp = DenseMLP(fields.integer("intermediate_size"), family == "llama" and fields.flag("mlp_bias"))
    windows = _sliding_windows(family, fields, num_layers)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        layers=tuple(LayerConfig(replace(attention, window=window), mlp) for window in windows),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=eos_token_ids,
    )


def _attention(family: str, fields: Fields, num_heads: int) -> HeadAttention:
    """Read the attention of every layer, without its window."""
    head_dim = _head_dim(fields, num_heads)
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads)
    has_bias = family != "mistral" and fields.flag("attention_bias")
    return HeadAttention(
        num_heads,
        num_kv_heads,
        head_dim,
        _rope(fields, head_dim),
        bias=has_bias,
        output_bias=has_bias,
        has_head_norms=family == "qwen3",
    )


def _head_dim(fields: Fields, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        allowed = f"a divisor of hidden_size, {hidden_size}, where head_dim is not given"
        raise fields.error("num_attention_heads", allowed)
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise InputError(f"head_dim in {fields.file}", head_dim, "an even number, as RoPE rotates pairs")
    return head_dim


def _rope(fields: Fields, size: int) -> Rope:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of transformers 4."""
    theta = {"rope_theta": fields.get("rope_theta", 10000.0)}
    given = [name for name in ("rope_parameters", "rope_scaling") if fields.get(name)] or ["rope_parameters"]
    first, *others = (_one_rope(name, fields.mapping(name).filled(theta), size) for name in given)
    if any(other != first for other in others):
        raise fields.error("rope_scaling", "equal to rope_parameters, rope_theta included, where both are given")
    return first


def _one_rope(name: str, rope: Fields, size: int) -> Rope:
    theta = rope.number("rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    require_choice(f"rope_type in {rope.file}", kind, ("default", "llama3"))
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise InputError(f"{name} in {rope.file}", dict(rope.values), "one setting for all layers")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise rope.error("partial_rotary_factor", "1")
    if kind == "default":
        return Rope(theta, size)
    return Rope(theta, size, {"rope_type": kind, **{factor: rope.number(factor) for factor in _LLAMA3_ROPE}})


def _sliding_windows(family: str, fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Compute the window of each layer, None where it has none."""
    if family == "llama":
        return (None,) * num_layers
    switched_on = family == "mistral" or fields.flag("use_sliding_window")
    window = fields.integer("sliding_window") if switched_on and fields.get("sliding_window") is not None else None
    is_listed = family == "qwen3" or fields.get("layer_types") is not None
    slides = _sliding_layers(fields, num_layers, window) if is_listed else [True] * num_layers
    return tuple(window if sliding else None for sliding in slides)


def _sliding_layers(fields: Fields, num_layers: int, window: int | None) -> list[bool]:
    """Find sliding layers in `layer_types`, or for Qwen3 without it, from `max_window_layers` on."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return [layer >= fields.integer("max_window_layers", least=0) for layer in range(num_layers)]
    full = "full_attention"
    sliding = "sliding_attention"
    listed = isinstance(layer_types, list) and all(kind in (full, sliding) for kind in layer_types)
    if not listed or len(layer_types) != num_layers:
        raise fields.error("layer_types", f"{num_layers} times {full} or {sliding}")
    if window is None and sliding in layer_types:
        raise fields.error("use_sliding_window", f"true, with a sliding_window, where layer_types has {sliding}")
    return [kind == sliding for kind in layer_types]


def _end_tokens(fields: Fields) -> tuple[int, ...]:
    ends = fields.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    if any(type(end) is not int for end in ends):
        raise fields.error("eos_token_id", "an integer, a list of integers or null")
    return tuple(ends)
