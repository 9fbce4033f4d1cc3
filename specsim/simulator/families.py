"""Model families whose config.json the simulator understands, by model_type."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specsim.core.errors import InputError

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
