"""Attention and MLP of every layer, read from a config.json."""

import math
from dataclasses import replace
from typing import Any

from specsim.core.errors import InputError, require_choice
from specsim.core.limits import MOST_EXPERTS
from specsim.core.target import MLP, Attention, DenseMLP, Experts, HeadAttention, LatentAttention, Rope
from specsim.models.checkpoint.fields import Fields

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_TYPES = ("default", "llama3", "yarn")


def read_rope(fields: Fields, size: int, interleaved: bool = False) -> Rope:
    """Read `rope_parameters` of transformers 5, or `rope_theta` and `rope_scaling` of transformers 4."""
    theta = {"rope_theta": fields.get("rope_theta", 10000.0)}
    names = [name for name in ("rope_parameters", "rope_scaling") if fields.get(name)] or ["rope_parameters"]
    for holder in (fields, *map(fields.mapping, names)):
        if holder.get("partial_rotary_factor", 1) != 1:
            raise holder.error("partial_rotary_factor", "1")
    settings = [_of_all_layers(name, fields.mapping(name)).filled(theta) for name in names]
    first, *others = (Rope(rope.number("rope_theta"), size, _scaling(rope), interleaved) for rope in settings)
    if any(other != first for other in others):
        raise fields.error("rope_scaling", "equal to rope_parameters, rope_theta included, where both are given")
    return first


def attention_factor(factor: float, multiplier: float = 1.0) -> float:
    """Compute YaRN's factor of cosines and sines (arXiv 2309.00071, equation 22), 1 where nothing is stretched."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def _of_all_layers(name: str, rope: Fields) -> Fields:
    """Give the one setting of RoPE, which may be repeated for every type of layer."""
    by_type = [value for value in rope.values.values() if isinstance(value, dict)]
    if not by_type:
        return rope
    if len(by_type) < len(rope.values) or any(value != by_type[0] for value in by_type):
        raise InputError(f"{name} in {rope.file}", dict(rope.values), "one setting for all layers")
    return Fields(rope.file, by_type[0], rope.read_names)


def _scaling(rope: Fields) -> dict[str, Any]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("linear", "dynamic") and rope.get("factor") == 1:
        kind = "default"  # a stretch by 1 is none
    require_choice(f"rope_type in {rope.file}", kind, _TYPES)
    if kind == "default":
        return {}
    numbers = {"rope_type": kind, "factor": rope.number("factor")}
    return numbers | ({part: rope.number(part) for part in _LLAMA3} if kind == "llama3" else _yarn(rope))


def _yarn(rope: Fields) -> dict[str, Any]:
    """Read YaRN's numbers, with the factor of cosines and sines that transformers derives where none is given.

    mscale and mscale_all_dim are DeepSeek's: the factor is the ratio of theirs, and the latter scales the scores too.
    """
    factor = rope.number("factor")
    scales = [rope.number(name) if rope.get(name) else 0.0 for name in ("mscale", "mscale_all_dim")]
    ratio = attention_factor(factor, scales[0]) / attention_factor(factor, scales[1])
    derived = ratio if all(scales) else attention_factor(factor)
    return {
        "original_max_position_embeddings": rope.number("original_max_position_embeddings"),
        "beta_fast": rope.number("beta_fast", default=32.0),
        "beta_slow": rope.number("beta_slow", default=1.0),
        "truncate": rope.flag("truncate", default=True),
        "attention_factor": rope.number("attention_factor", default=derived),
        **({"mscale_all_dim": scales[1]} if scales[1] else {}),
    }


_LISTED = ("qwen2", "qwen3", "gpt_oss")  # families whose layers slide as `layer_types` says, or its default
_UNLISTED = ("llama", "qwen3_moe", "deepseek_v3")  # families whose `layer_types` transformers ignores


def read_attention(family: str, fields: Fields, num_layers: int) -> list[Attention]:
    """Read the attention of each layer."""
    if family in _UNLISTED and fields.get("layer_types") not in (None, ["full_attention"] * num_layers):
        allowed = f"full_attention in every layer of a {family} model, as only some readers give other layers windows"
        raise fields.error("layer_types", allowed)
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
        first = 0 if window is None else fields.integer("max_window_layers", least=0)
        return [layer >= first for layer in range(num_layers)]
    full = "full_attention"
    sliding = "sliding_attention"
    listed = isinstance(layer_types, list) and all(kind in (full, sliding) for kind in layer_types)
    if not listed or len(layer_types) != num_layers:
        raise fields.error("layer_types", f"{num_layers} times {full} or {sliding}")
    if window is None and sliding in layer_types:
        raise fields.error("use_sliding_window", f"true, with a sliding_window, where layer_types has {sliding}")
    return [kind == sliding for kind in layer_types]


def read_mlps(family: str, fields: Fields, num_layers: int) -> list[MLP]:
    """Read the MLP of each layer."""
    if family == "gpt_oss":
        return [_gpt_oss(fields)] * num_layers
    if family == "qwen3_moe":
        return _qwen3_moe(fields, num_layers)
    dense = DenseMLP(fields.integer("intermediate_size"), family == "llama" and fields.flag("mlp_bias"))
    if family == "deepseek_v3":
        count = fields.integer("first_k_dense_replace", least=0)
        has_experts = count < num_layers or fields.get("moe_intermediate_size") is not None
        experts = deepseek_experts(fields) if has_experts else dense
        return [dense if layer < count else experts for layer in range(num_layers)]
    return [dense] * num_layers


def _gpt_oss(fields: Fields) -> Experts:
    for name, value in (("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)):
        if fields.number(name, default=value) != value:
            raise fields.error(name, str(value))
    return Experts(
        _num_experts(fields),
        fields.integer("num_experts_per_tok"),
        fields.integer("intermediate_size"),
        "softmax_of_top",
        activation="clamped",
        bias=True,
        router_bias=True,
    )


def _qwen3_moe(fields: Fields, num_layers: int) -> list[MLP]:
    """Read experts, and dense MLPs in `mlp_only_layers` and off `decoder_sparse_step`."""
    dense_layers = fields.get("mlp_only_layers", [])
    allowed = f"a list of layers 0 to {num_layers - 1}"
    if not isinstance(dense_layers, list) or any(layer not in range(num_layers) for layer in dense_layers):
        raise fields.error("mlp_only_layers", allowed)
    step = fields.integer("decoder_sparse_step", default=1)
    sparse = [layer not in dense_layers and (layer + 1) % step == 0 for layer in range(num_layers)]
    experts = Experts(
        _num_experts(fields),
        fields.integer("num_experts_per_tok"),
        fields.integer("moe_intermediate_size"),
        "softmax",
        normalise=fields.flag("norm_topk_prob"),
    )
    if all(sparse):
        return [experts] * num_layers
    dense = DenseMLP(fields.integer("intermediate_size"))
    return [experts if is_sparse else dense for is_sparse in sparse]


def deepseek_experts(fields: Fields) -> Experts:
    """Read DeepSeek-V3's experts, which its drafting modules have too."""
    fields.choice("scoring_func", ("sigmoid",), default="sigmoid")
    fields.choice("topk_method", ("noaux_tc",), default="noaux_tc")
    if fields.integer("moe_layer_freq", default=1) != 1:
        raise fields.error("moe_layer_freq", "1")
    size = fields.integer("moe_intermediate_size")
    shared = fields.integer("n_shared_experts", default=0, least=0)
    return Experts(
        fields.integer("n_routed_experts", most=MOST_EXPERTS),
        fields.integer("num_experts_per_tok"),
        size,
        "grouped_sigmoid",
        normalise=fields.flag("norm_topk_prob", default=True),
        groups=fields.integer("n_group"),
        top_groups=fields.integer("topk_group"),
        scaling=fields.number("routed_scaling_factor"),
        shared_size=shared * size or None,
    )


def _num_experts(fields: Fields) -> int:
    """Read `num_experts`, which some files name `num_local_experts`."""
    names = [name for name in ("num_experts", "num_local_experts") if fields.get(name) is not None] or ["num_experts"]
    counts = [fields.integer(name, most=MOST_EXPERTS) for name in names]
    if len(set(counts)) > 1:
        raise fields.error("num_local_experts", f"num_experts, {counts[0]}, where both are given")
    return counts[0]
