"""Attention of every layer, from a config.json."""

from dataclasses import replace

from specsim.core.errors import InputError
from specsim.core.target import Attention, HeadAttention, LatentAttention
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.rope_fields import attention_factor, read_rope

_LISTED = ("qwen2", "qwen3", "gpt_oss")  # families whose layers slide as `layer_types` says, or its default


def read_attention(family: str, fields: Fields, num_layers: int) -> list[Attention]:
    """Read the attention of each layer."""
    if family == "deepseek_v3":
        return [_latent(fields)] * num_layers
    heads = _heads(family, fields)
    return [replace(heads, window=window) for window in _windows(family, fields, num_layers)]


def _heads(family: str, fields: Fields) -> HeadAttention:
    """Read keys and values of heads, without a window."""
    num_heads = fields.integer("num_attention_heads")
    head_dim = _head_dim(fields, num_heads)
    has_bias = family not in ("mistral", "qwen2") and fields.flag("attention_bias", default=family == "gpt_oss")
    return HeadAttention(
        num_heads,
        fields.integer("num_key_value_heads", default=num_heads),
        head_dim,
        read_rope(fields, head_dim),
        bias=has_bias or family == "qwen2",
        output_bias=has_bias,
        has_head_norms=family in ("qwen3", "qwen3_moe"),
        has_sinks=family == "gpt_oss",
    )


def _head_dim(fields: Fields, num_heads: int) -> int:
    hidden_size = fields.integer("hidden_size")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        allowed = f"a divisor of hidden_size, {hidden_size}, where head_dim is not given"
        raise fields.error("num_attention_heads", allowed)
    head_dim = fields.integer("head_dim", default=hidden_size // num_heads)
    _require_even("head_dim", head_dim, fields)
    return head_dim


def _latent(fields: Fields) -> LatentAttention:
    """Read DeepSeek's latent attention, whose scores YaRN scales by the square of its own factor."""
    if "q_lora_rank" not in fields.values:
        raise fields.error("q_lora_rank", "an integer, or null where one projection makes the queries")
    rope_dim = fields.integer("qk_rope_head_dim")
    _require_even("qk_rope_head_dim", rope_dim, fields)
    nope_dim = fields.integer("qk_nope_head_dim")
    rope = read_rope(fields, rope_dim, interleaved=fields.flag("rope_interleave", default=True))
    multiplier = rope.scaling.get("mscale_all_dim", 0.0)
    factor = attention_factor(rope.scaling["factor"], multiplier) if multiplier else 1.0
    return LatentAttention(
        fields.integer("num_attention_heads"),
        query_rank=None if fields.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        latent_rank=fields.integer("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=fields.integer("v_head_dim"),
        scale=(nope_dim + rope_dim) ** -0.5 * factor**2,
        rope=rope,
        bias=fields.flag("attention_bias"),
    )


def _require_even(name: str, size: int, fields: Fields) -> None:
    if size % 2:
        raise InputError(f"{name} in {fields.file}", size, "an even number, as RoPE rotates pairs")


def _windows(family: str, fields: Fields, num_layers: int) -> list[int | None]:
    """Compute the window of each layer, None where it has none."""
    if family == "qwen3_moe" and fields.flag("use_sliding_window"):
        raise fields.error("use_sliding_window", "false, as readers of the format differ in the layers that slide")
    if family in ("llama", "qwen3_moe"):
        return [None] * num_layers
    switched_on = family in ("mistral", "gpt_oss") or fields.flag("use_sliding_window")
    window = fields.integer("sliding_window") if switched_on and fields.get("sliding_window") is not None else None
    is_listed = family in _LISTED or fields.get("layer_types") is not None
    slides = _sliding_layers(family, fields, num_layers, window) if is_listed else [True] * num_layers
    return [window if sliding else None for sliding in slides]


def _sliding_layers(family: str, fields: Fields, num_layers: int, window: int | None) -> list[bool]:
    """Find sliding layers in `layer_types`.

    Without it they are every other one in GPT-OSS, and those from `max_window_layers` on in Qwen2 and Qwen3.
    """
    layer_types = fields.get("layer_types")
    if layer_types is None and family == "gpt_oss":
        return [layer % 2 == 0 for layer in range(num_layers)]
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
