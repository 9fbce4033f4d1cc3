"""Weights, KV and operations of one layer, read from the config.json of a family of models."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import Any

from specsim.core.errors import InputError, require_choice
from specsim.core.limits import MOST_EXPERTS, MOST_HEADS
from specsim.simulator.bounds import flag, integer, model_size

FULL = "full_attention"
WINDOWED = ("sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class Family:
    """Fields in which the configs of a family differ from Llama's."""

    products: int = 3  # of a feed-forward, that of its gate included
    has_experts: bool = False
    expert_width: str = "moe_intermediate_size"
    dense_width: str = "intermediate_size"
    shares_one: bool = False  # one shared expert of an expert's width in every layer of experts
    full_every: int | None = None  # only every n-th layer sees all columns; None: all layers have the window
    uses_window: bool = True  # default of use_sliding_window
    is_tied: bool = False  # default of tie_word_embeddings


_DEEPSEEK = Family(has_experts=True)
_QWEN = Family(uses_window=False)
_QWEN_MOE = Family(has_experts=True, uses_window=False)

FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "ministral3": Family(),
    "phi3": Family(),
    "granite": Family(),
    "glm4": Family(),
    "olmo2": Family(),
    "stablelm": Family(),
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "qwen3_vl_text": _QWEN,
    "gemma": Family(is_tied=True),
    "gemma2": Family(is_tied=True, full_every=2),
    "gemma3_text": Family(is_tied=True, full_every=6),
    "cohere": Family(is_tied=True),
    "cohere2": Family(is_tied=True, full_every=4),
    "gpt_neox": Family(products=2),
    "phi": Family(products=2),
    "nemotron": Family(products=2),
    "starcoder2": Family(products=2, is_tied=True),
    "mixtral": Family(has_experts=True, expert_width="intermediate_size"),
    "minimax_m2": Family(has_experts=True, expert_width="intermediate_size"),
    "gpt_oss": Family(has_experts=True, expert_width="intermediate_size", full_every=2),
    "olmoe": Family(has_experts=True, expert_width="intermediate_size"),
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "qwen3_vl_moe_text": _QWEN_MOE,
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "glm4_moe_lite": _DEEPSEEK,
    "llama4_text": Family(
        has_experts=True,
        expert_width="intermediate_size",
        dense_width="intermediate_size_mlp",
        shares_one=True,
        full_every=4,
    ),
}
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def family_of(config: Mapping[str, Any]) -> Family:
    """Find the family of a config.

    InputError for an unknown model_type, or one that contradicts the config's experts.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError("model_type", name, f"one whose layers are understood: {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    count = expert_count(config)
    if count and not family.has_experts:
        raise InputError("model_type", name, f"a family with experts, since the config has {count}")
    if not count and family.has_experts:
        raise InputError("num_experts", count, f"an integer of at least 1 in a config of {name}")
    return family


def expert_count(config: Mapping[str, Any]) -> Any:
    """Read the number of a layer's experts, under any of the names of this field; None without any."""
    return next((config[field] for field in _COUNTS if config.get(field)), None)


_SHARED = "shared_expert_intermediate_size"


@dataclass(frozen=True, slots=True)
class Layers:
    """A group of `count` equal layers."""

    count: int
    attention_weights: int  # all projections
    input_weights: int  # projections that read hidden states of width H (q, k and v)
    kv_width: int  # numbers kept per token
    kv_parts: int  # most GPUs that can share them
    pair_flops: int  # operations of one row with one column, scores and values
    window: int | None  # columns that a row sees, None for all
    dense_weights: int  # feed-forward for every row, shared experts and router included
    parts: int  # most GPUs that can share heads and feed-forward
    experts: int = 0  # experts per layer, 0 for none
    experts_per_token: int = 0
    expert_weights: int = 0  # of one expert

    @property
    def weights(self) -> int:
        """Weights of one layer."""
        return self.attention_weights + self.dense_weights + self.experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """Weights of one layer that one token uses."""
        return self.attention_weights + self.dense_weights + self.experts_per_token * self.expert_weights

    @property
    def kernels(self) -> int:
        """Number of launches of one layer: norm, qkv, rotation, attention, o, norm, and the feed-forward."""
        return 6 + (6 if self.experts else 3)


def layers_of(config: Mapping[str, Any]) -> tuple[Layers, ...]:
    """Read the layers of a config.json, equal neighbours grouped; InputError names a wrong or missing field."""
    family = family_of(config)
    attention = _latent_attention(config) if config.get("kv_lora_rank") else _attention(config)
    heads = config["num_attention_heads"]
    is_sparse = _sparse_layers(config, family)
    layers = []
    for (window, sparse), group in groupby(zip(_windows(config, family), is_sparse, strict=True)):
        feed_forward = _experts(config, family) if sparse else _dense(config, family)
        width = _width(config, family.expert_width if sparse else family.dense_width)
        layers.append(
            Layers(count=len(list(group)), window=window, parts=gcd(heads, width), **attention, **feed_forward)
        )
    return tuple(layers)


def _attention(config: Mapping[str, Any]) -> dict[str, int]:
    """Make the fields of Layers for keys and values of every head."""
    heads = model_size("num_attention_heads", config.get("num_attention_heads"), most=MOST_HEADS)
    hidden = config["hidden_size"]
    kv_heads = model_size("num_key_value_heads", config.get("num_key_value_heads") or heads)
    head_dim = model_size("head_dim", config.get("head_dim") or hidden // heads)
    if heads % kv_heads:
        raise InputError("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    entering = hidden * (heads + 2 * kv_heads) * head_dim
    return {
        "attention_weights": entering + hidden * heads * head_dim,
        "input_weights": entering,
        "kv_width": 2 * kv_heads * head_dim,
        "kv_parts": kv_heads,
        "pair_flops": 4 * heads * head_dim,
    }


def _latent_attention(config: Mapping[str, Any]) -> dict[str, int]:
    """Make the fields of Layers for one latent vector per token (MLA), used directly by scores and sums."""
    fields = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, rank, plain, rotated, value = (model_size(name, config.get(name)) for name in fields)
    model_size("num_attention_heads", heads, most=MOST_HEADS)
    hidden = config["hidden_size"]
    query_rank = model_size("q_lora_rank", config.get("q_lora_rank") or 0, 0)
    query = heads * (plain + rotated)
    to_query = hidden * query_rank + query_rank * query if query_rank else hidden * query
    rest = rank * heads * (plain + value) + heads * value * hidden
    return {
        "attention_weights": to_query + hidden * (rank + rotated) + rest,
        "input_weights": hidden * (rank + rotated) + (hidden * query_rank if query_rank else hidden * query),
        "kv_width": rank + rotated,
        "kv_parts": 1,
        "pair_flops": 2 * heads * (2 * rank + rotated),
    }


def _windows(config: Mapping[str, Any], family: Family) -> list[int | None]:
    """List the columns that a row of each layer sees, None for all; in layers of chunks a whole chunk."""
    field = "attention_chunk_size" if config.get("attention_chunk_size") else "sliding_window"
    uses_window = flag("use_sliding_window", config.get("use_sliding_window", family.uses_window))
    window = config.get(field) if uses_window else None
    kinds = _kinds(config, family)
    for kind in kinds:
        if kind not in (FULL, *WINDOWED):
            raise InputError("layer_types", kind, " or ".join((FULL, *WINDOWED)))
    if not window:
        return [None] * len(kinds)
    integer(field, window)
    return [None if kind == FULL else window for kind in kinds]


def _kinds(config: Mapping[str, Any], family: Family) -> list[Any]:
    """List the kind of attention of every layer, in the words of layer_types."""
    if (kinds := _by_layer(config, "layer_types")) is not None:
        return kinds
    indices = range(config["num_hidden_layers"])
    if config.get("no_rope_layers"):  # Llama 4: layers without rotary positions, 0 in this list, see all columns
        flags = _by_layer(config, "no_rope_layers") or []
        for has_rope in flags:
            require_choice("no_rope_layers", has_rope, (0, 1))
        return [WINDOWED[1] if has_rope else FULL for has_rope in flags]
    every = config.get("sliding_window_pattern") or config.get("no_rope_layer_interval") or family.full_every
    if every:
        integer("sliding_window_pattern", every)
        return [WINDOWED[0] if (index + 1) % every else FULL for index in indices]
    first = integer("max_window_layers", config.get("max_window_layers", 0), 0)
    return [WINDOWED[0] if index >= first else FULL for index in indices]


def _sparse_layers(config: Mapping[str, Any], family: Family) -> list[bool]:
    """Whether the feed-forward of each layer consists of experts."""
    indices = range(config["num_hidden_layers"])
    if not family.has_experts:
        return [False for _ in indices]
    if (kinds := _by_layer(config, "mlp_layer_types")) is not None:
        for kind in kinds:
            require_choice("mlp_layer_types", kind, ("dense", "sparse"))
        return [kind == "sparse" for kind in kinds]
    if (chosen := _list(config, "moe_layers")) is not None:
        return [index in chosen for index in indices]
    dense = _list(config, "mlp_only_layers") or ()
    first = integer("first_k_dense_replace", config.get("first_k_dense_replace") or 0, 0)
    period = integer("moe_layer_freq", config.get("moe_layer_freq", 1))
    field = "interleave_moe_layer_step" if "interleave_moe_layer_step" in config else "decoder_sparse_step"
    step = integer(field, config.get(field, 1))
    is_sparse = lambda index: index >= first and index % period == 0 and (index + 1) % step == 0  # noqa: E731
    return [is_sparse(index) and index not in dense for index in indices]


def _by_layer(config: Mapping[str, Any], field: str) -> list[Any] | None:
    """Read a field with one entry per layer, None where it is missing."""
    entries = _list(config, field)
    count = config["num_hidden_layers"]
    if entries is not None and len(entries) != count:
        raise InputError(field, f"{len(entries)} layers", f"one for each of {count}")
    return entries


def _list(config: Mapping[str, Any], field: str) -> list[Any] | None:
    value = config.get(field)
    if value is not None and not isinstance(value, (list, tuple)):
        raise InputError(field, value, "a list")
    return None if value is None else list(value)


def _dense(config: Mapping[str, Any], family: Family) -> dict[str, int]:
    """Make the fields of Layers for one feed-forward for all rows."""
    return {"dense_weights": family.products * config["hidden_size"] * _width(config, family.dense_width)}


def _experts(config: Mapping[str, Any], family: Family) -> dict[str, int]:
    """Make the fields of Layers for chosen experts, shared experts and the router."""
    hidden = config["hidden_size"]
    experts = model_size("num_experts", expert_count(config), most=MOST_EXPERTS)
    chosen = model_size("num_experts_per_tok", config.get("num_experts_per_tok"))
    width = _width(config, family.expert_width)
    if chosen > experts:
        raise InputError("num_experts_per_tok", chosen, f"at most the {experts} experts")
    shared = config.get(_SHARED)
    if shared is None:
        count = 1 if family.shares_one else config.get("n_shared_experts") or 0
        shared = width * model_size("n_shared_experts", count, 0, MOST_EXPERTS)
    return {
        "dense_weights": hidden * experts + family.products * hidden * integer(_SHARED, shared, 0),
        "experts": experts,
        "experts_per_token": chosen,
        "expert_weights": family.products * hidden * width,
    }


def _width(config: Mapping[str, Any], field: str) -> int:
    return model_size(field, config.get(field))
