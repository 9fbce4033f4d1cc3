"""Decoders of hidden size 32, of every family, for synthetic pairs and tests."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specsim.core.errors import InputError
from specsim.core.target import (
    MLP,
    Attention,
    DenseMLP,
    Experts,
    HeadAttention,
    LatentAttention,
    LayerConfig,
    ModelConfig,
    Rope,
)

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rope_theta": 10000.0,
    "rope_scaling": {},
    "attention_bias": False,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_ids": (),
    "expert": {},
    "latent": {},
}
_OF_MODEL = ("hidden_size", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "eos_token_ids")


def tiny_config(
    family: str = "llama", num_layers: int = 2, vocab_size: int = 48, window: int | None = None, **changes: Any
) -> ModelConfig:
    """Make a decoder of this family, with four query heads.

    There are two KV heads of 16, or a latent vector of 16.

    window: of every layer, in gpt_oss of even ones, 5 if None. changes: sliding_windows (by layer), or other values for
    _SIZES. There `expert` and `latent` are fields of Experts and LatentAttention.
    """
    windows = changes.pop("sliding_windows", None)
    if unknown := set(changes) - set(_SIZES):
        raise InputError("changes", ", ".join(sorted(unknown)), f"sliding_windows, {', '.join(_SIZES)}")
    sizes = _SIZES | changes
    if windows is None and family == "gpt_oss":
        windows = [None if layer % 2 else window or 5 for layer in range(num_layers)]
    attention = _latent(sizes) if family == "deepseek_v3" else _heads(family, sizes)
    mlps = [_mlp(family, sizes, layer) for layer in range(num_layers)]
    layers = tuple(LayerConfig(attention, mlp) for mlp in mlps)
    model = {name: sizes[name] for name in _OF_MODEL}
    config = ModelConfig(family=family, vocab_size=vocab_size, layers=layers, **model)
    return config.with_windows(windows or (window,) * num_layers)


def _heads(family: str, sizes: Mapping[str, Any]) -> Attention:
    has_bias = sizes["attention_bias"] or family == "gpt_oss"
    return HeadAttention(
        sizes["num_heads"],
        sizes["num_kv_heads"],
        sizes["head_dim"],
        Rope(sizes["rope_theta"], sizes["head_dim"], sizes["rope_scaling"]),
        bias=has_bias or family == "qwen2",
        output_bias=has_bias,
        has_head_norms=family in ("qwen3", "qwen3_moe"),
        has_sinks=family == "gpt_oss",
    )


def _latent(sizes: Mapping[str, Any]) -> Attention:
    latent = LatentAttention(
        sizes["num_heads"],
        query_rank=24,
        latent_rank=16,
        nope_dim=12,
        rope_dim=8,
        value_dim=10,
        scale=20**-0.5,
        rope=Rope(sizes["rope_theta"], 8, sizes["rope_scaling"], interleaved=True),
        bias=sizes["attention_bias"],
    )
    return replace(latent, **sizes["latent"])


def _mlp(family: str, sizes: Mapping[str, Any], layer: int) -> MLP:
    if family == "gpt_oss":
        experts = Experts(6, 2, 24, "softmax_of_top", activation="clamped", bias=True, router_bias=True)
    elif family == "qwen3_moe":
        experts = Experts(6, 2, 24, "softmax", normalise=True)
    elif family == "deepseek_v3" and layer > 0:
        experts = Experts(8, 3, 24, "grouped_sigmoid", True, groups=4, top_groups=2, scaling=2.5, shared_size=24)
    else:
        return DenseMLP(sizes["intermediate_size"], sizes["mlp_bias"])
    return replace(experts, **sizes["expert"])
