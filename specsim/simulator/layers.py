"""Weights, KV and operations of one layer, read from a config.json of any of the usual families."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import Any

from specsim.core.errors import InputError
from specsim.simulator.bounds import whole

_TWO_PRODUCTS = {"gpt_neox", "opt", "phi", "starcoder2", "nemotron"}  # feed-forwards without a gate
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` equal layers."""

    count: int
    attention_weights: int  # all projections
    input_weights: int  # projections that read hidden states of width H (q, k and v)
    kv_width: int  # numbers that a token keeps
    kv_parts: int  # most GPUs that share them
    pair_flops: int  # operations of one row with one column, scores and values
    window: int | None  # columns that a row sees, None for all
    dense_weights: int  # feed-forward that every row runs through, shared experts and router included
    parts: int  # most GPUs that share heads and feed-forward
    experts: int = 0  # experts to choose from, 0 for none
    experts_per_token: int = 0
    expert_weights: int = 0  # of one expert

    @property
    def weights(self) -> int:
        """Weights of one layer."""
        return self.attention_weights + self.dense_weights + self.experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """Weights of one layer that one token runs through."""
        return self.attention_weights + self.dense_weights + self.experts_per_token * self.expert_weights

    @property
    def kernels(self) -> int:
        """Launches of one layer: norm, qkv, rotation, attention, o, norm, and the feed-forward's products and gate."""
        return 6 + (6 if self.experts else 3)


def layers_of(config: Mapping[str, Any]) -> tuple[Layers, ...]:
    """The layers of a config.json, equal neighbours together; InputError names a field that is missing or wrong."""
    attention = _latent_attention(config) if config.get("kv_lora_rank") else _attention(config)
    indices = range(config["num_hidden_layers"])
    each = [(_window(config, index), _is_sparse(config, index)) for index in indices]
    return tuple(
        Layers(
            count=len(list(group)),
            window=window,
            parts=gcd(config["num_attention_heads"], _expert_width(config) if sparse else _dense_width(config)),
            **attention,
            **(_experts(config) if sparse else {"dense_weights": _products(config) * _dense_width(config)}),
        )
        for (window, sparse), group in groupby(each)
    )


def _attention(config: Mapping[str, Any]) -> dict[str, int]:
    """Fields of Layers: keys and values of every head."""
    heads = whole("num_attention_heads", config.get("num_attention_heads"))
    hidden = config["hidden_size"]
    kv_heads = whole("num_key_value_heads", config.get("num_key_value_heads") or heads)
    head_dim = whole("head_dim", config.get("head_dim") or hidden // heads)
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
    """Fields of Layers: one latent vector per token (MLA), from which scores and sums are taken directly."""
    fields = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, rank, plain, rotated, value = (whole(name, config.get(name)) for name in fields)
    hidden = config["hidden_size"]
    query_rank = config.get("q_lora_rank")
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


def _window(config: Mapping[str, Any], index: int) -> int | None:
    """Columns that a row of this layer sees."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return None
    whole("sliding_window", window)
    kinds = config.get("layer_types")
    if kinds is not None:
        if len(kinds) != config["num_hidden_layers"]:
            raise InputError("layer_types", f"{len(kinds)} layers", f"one for each of {config['num_hidden_layers']}")
        return window if kinds[index] == "sliding_attention" else None
    if "max_window_layers" in config:
        return window if index >= config["max_window_layers"] else None
    return window


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    """Whether this layer's feed-forward is made of experts."""
    if not any(config.get(name) for name in _EXPERTS) or index in config.get("mlp_only_layers", ()):
        return False
    return index >= config.get("first_k_dense_replace", 0) and (index + 1) % config.get("decoder_sparse_step", 1) == 0


def _experts(config: Mapping[str, Any]) -> dict[str, int]:
    """Fields of Layers: experts that rows choose, shared experts and the router."""
    hidden = config["hidden_size"]
    experts = next(config[name] for name in _EXPERTS if config.get(name))
    chosen = whole("num_experts_per_tok", config.get("num_experts_per_tok"))
    width = _expert_width(config)
    if chosen > experts:
        raise InputError("num_experts_per_tok", chosen, f"at most the {experts} experts")
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    return {
        "dense_weights": hidden * experts + _products(config) * shared,
        "experts": experts,
        "experts_per_token": chosen,
        "expert_weights": _products(config) * width,
    }


def _products(config: Mapping[str, Any]) -> int:
    """Weights of a feed-forward for each unit of its width."""
    return (2 if config.get("model_type") in _TWO_PRODUCTS else 3) * config["hidden_size"]


def _dense_width(config: Mapping[str, Any]) -> int:
    return whole("intermediate_size", config.get("intermediate_size"))


def _expert_width(config: Mapping[str, Any]) -> int:
    return whole("moe_intermediate_size", config.get("moe_intermediate_size", config.get("intermediate_size")))
