"""Synthetic pairs: a small random target, and a drafter whose noise sets how often it agrees.

The embedding of the target's last token dominates its residual stream, so its next token depends mostly on that token.
The drafter copies the same embedding and reads it through the same head. So it proposes the same token, unless its
noise or the context that it does not model changes the decision.
"""

from typing import Any

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.layout import Layout, drafter_layout, target_layout

Tensors = dict[str, torch.Tensor]
# Llama 3.1's rotary scaling, for contexts as short as these pairs'.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def tiny_config(
    family: str = "llama", num_layers: int = 2, vocab_size: int = 48, window: int | None = None, **changes: Any
) -> ModelConfig:
    """Make a decoder of hidden 32, with four query heads and two KV heads of 16.

    changes: other fields of ModelConfig.
    """
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    limits = {"rms_norm_eps": 1e-5, "max_position_embeddings": 512, "rope_theta": 10000.0}
    sizes = {"vocab_size": vocab_size, "num_layers": num_layers, "sliding_windows": (window,) * num_layers}
    return ModelConfig(**{"family": family, **shape, **limits, **sizes, **changes})


def random_target(config: ModelConfig, seed: int = 0, context: float = 0.1, sharpness: float = 0.5) -> TargetCheckpoint:
    """Make random weights of a dense family.

    context: scale of the layers' weights, against embeddings whose entries are ±1. sharpness: scale of the head.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = _random(target_layout(config), context, generator)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].sign()
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    tensors["lm_head.weight"] *= sharpness / context
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return TargetCheckpoint(config, tensors)


def synthetic_pair(
    kind: str = "eagle3",
    family: str = "llama",
    *,
    seed: int = 0,
    noise: float = 0.02,
    num_layers: int = 2,
    **changes: Any,
) -> Pair:
    """Make a pair without a tokenizer, whose first draft is accepted about 4 times in 10 at temperature 1.

    noise: more of it means less agreement. kind: `eagle`, or `eagle3` with a draft vocabulary of seven eighths of the
    target vocabulary. changes: arguments of tiny_config.
    """
    target = random_target(tiny_config(family, num_layers, **changes), seed)
    model = tiny_config(family, 1, **changes)
    generator = torch.Generator().manual_seed(seed + 1)
    drafter = (_eagle if kind == "eagle" else _eagle3)(model, target, noise, generator)
    return Pair(target=target, drafter=drafter, tokenizer=None, name=f"synthetic {kind} on {family}")


def _random(layout: Layout, scale: float, generator: torch.Generator) -> Tensors:
    """Draw normal weights of this scale, and norms around 1 with half of it."""
    tensors = {}
    for name, shape in layout.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = 1 + scale / 2 * values if "norm" in name else scale * values
    return tensors


def _eagle(model: ModelConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> DrafterCheckpoint:
    """Make an EAGLE head whose fc copies the embedding."""
    hidden = model.hidden_size
    config = DrafterConfig("eagle", model, draft_vocab_size=model.vocab_size, target_hidden_size=hidden)
    required, optional = drafter_layout(config)
    tensors = _random(required | optional, noise, generator)
    tensors["embed_tokens.weight"] = target.tensors["model.embed_tokens.weight"]
    tensors["fc.weight"][:, :hidden] += torch.eye(hidden, dtype=torch.float64)
    return DrafterCheckpoint(config, tensors)


def _eagle3(
    model: ModelConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator
) -> DrafterCheckpoint:
    """Make an EAGLE-3 head whose attention to the own row replaces the residual by the new token's embedding."""
    hidden = model.hidden_size
    vocab = model.vocab_size
    chosen = torch.linspace(0, vocab - 1, vocab * 7 // 8).long()
    feature_layers = tuple(range(target.config.num_layers))[-3:]
    config = DrafterConfig("eagle3", model, len(chosen), hidden, feature_layers)
    layout, _ = drafter_layout(config)
    fused = hidden * len(feature_layers)
    tensors = _random(layout, noise, generator)
    tensors["fc.weight"] *= fused**-0.5 / noise if noise else 0
    tensors["lm_head.weight"] = target.tensors["lm_head.weight"][chosen]
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    _attend_to_itself(tensors, model)
    return DrafterCheckpoint(config, tensors)


def _attend_to_itself(tensors: Tensors, model: ModelConfig) -> None:
    """Give queries and keys a constant feature, so that rotation makes distance 0 the best match.

    The value is the embedding minus the hidden state, which the residual adds back.
    """
    prefix = "midlayer.self_attn."
    identity = torch.eye(model.hidden_size, dtype=torch.float64)
    for name in ("q", "k"):
        tensors[f"{prefix}{name}_proj.weight"][:, 0] += 4.0
        if model.family == "qwen3":  # its norm of every head would take the factor out again
            tensors[f"{prefix}{name}_norm.weight"] *= 4.0
    tensors[f"{prefix}v_proj.weight"] += torch.cat([identity, -identity], dim=1)
    first_of_group = tensors[f"{prefix}o_proj.weight"].unflatten(1, (model.num_kv_heads, -1, model.head_dim))[:, :, 0]
    first_of_group += identity.unflatten(1, (model.num_kv_heads, model.head_dim))
