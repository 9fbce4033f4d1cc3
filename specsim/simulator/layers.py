"""What one layer weighs, keeps and computes, read from a config.json of any of the usual families."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from math import gcd
from typing import Any

from specsim.core.errors import InputError
from specsim.simulator.bounds import whole

_TWO_PRODUCTS = {"gpt_neox", "opt", "phi", "starcoder2", "nemotron"}  # feed-forwards without a gate
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class Layers:
    """`count` equal layers.

    attention_weights: of all projections; input_weights: of those that read hidden states of width H (q, k and v).
    kv_width: numbers a token keeps; kv_parts: into how many GPUs they can be split. pair_flops: operations of one row
    with one column, scores and values. parts: into how many GPUs heads and feed-forward can be split. window: columns
    that a row sees, None for all. dense_weights: of the feed-forward that every row meets, shared experts and router
    included; experts, experts_per_token, expert_weights: of those that rows choose, 0 for none.
    """

    count: int
    attention_weights: int
    input_weights: int
    kv_width: int
    kv_parts: int
    pair_flops: int
    window: int | None
    dense_weights: int
    experts: int = 0
    experts_per_token: int = 0
    expert_weights: int = 0
    parts: int = field(kw_only=True)

    @property
    def weights(self) -> int:
        """Weights of one layer."""
        return self.attention_weights + self.dense_weights + self.experts * self.expert_weights

    @property
    def active_weights(self) -> int:
        """Weights of one layer that one token meets."""
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
        Layers(len(list(group)), *attention, window, *_feed_forward(config, sparse), parts=_parts(config, sparse))
        for (window, sparse), group in groupby(each)
    )


def _attention(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    whole("num_attention_heads", config.get("num_attention_heads"))
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    whole("num_key_value_heads", kv_heads)
    whole("head_dim", head_dim)
    if heads % kv_heads:
        raise InputError("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads, {heads}")
    entering = hidden * (heads + 2 * kv_heads) * head_dim
    return entering + hidden * heads * head_dim, entering, 2 * kv_heads * head_dim, kv_heads, 4 * heads * head_dim


def _latent_attention(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    """Keys and values from one latent vector a token (MLA), which scores and sums are taken of directly."""
    fields = ("num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    for name in fields:
        whole(name, config.get(name))
    heads, rank, plain, rotated, value = (config[name] for name in fields)
    hidden, query_rank = config["hidden_size"], config.get("q_lora_rank")
    query = heads * (plain + rotated)
    to_query = hidden * query_rank + query_rank * query if query_rank else hidden * query
    entering = hidden * (rank + rotated) + (hidden * query_rank if query_rank else hidden * query)
    rest = rank * heads * (plain + value) + heads * value * hidden
    return to_query + hidden * (rank + rotated) + rest, entering, rank + rotated, 1, 2 * heads * (2 * rank + rotated)


def _window(config: Mapping[str, Any], index: int) -> int | None:
    """The columns a row of this layer sees."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if not window or config.get("use_sliding_window") is False:
        return None
    whole("sliding_window", window)
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


def _feed_forward(config: Mapping[str, Any], sparse: bool) -> tuple[int, int, int, int]:
    hidden, products = config["hidden_size"], 2 if config.get("model_type") in _TWO_PRODUCTS else 3
    if not sparse:
        whole("intermediate_size", config.get("intermediate_size"))
        return products * hidden * config["intermediate_size"], 0, 0, 0
    experts = next(config[name] for name in _EXPERTS if config.get(name))
    chosen, width = config.get("num_experts_per_tok"), _expert_width(config)
    whole("num_experts_per_tok", chosen)
    whole("moe_intermediate_size", width)
    if chosen > experts:
        raise InputError("num_experts_per_tok", chosen, f"at most the {experts} experts")
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    return hidden * experts + products * hidden * shared, experts, chosen, products * hidden * width


def _expert_width(config: Mapping[str, Any]) -> int | None:
    return config.get("moe_intermediate_size", config.get("intermediate_size"))


def _parts(config: Mapping[str, Any], sparse: bool) -> int:
    return gcd(config["num_attention_heads"], _expert_width(config) if sparse else config["intermediate_size"])
