"""Configs and norms of transformers' models with the sizes of a model of ours."""

from typing import Any

import torch
from transformers import LlamaConfig

from specsim.core.target import ModelConfig


def sizes_of(model: ModelConfig) -> dict[str, Any]:
    """Make the fields that every family has, with PyTorch's attention (the eager one is float32)."""
    return dict(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers, head_dim=model.head_dim, rms_norm_eps=model.rms_norm_eps,
        num_attention_heads=model.num_heads, num_key_value_heads=model.num_kv_heads,
        max_position_embeddings=model.max_position_embeddings, attn_implementation="sdpa",
        rope_parameters={"rope_theta": model.rope.theta, "rope_type": "default", **model.rope.scaling},
    )  # fmt: skip


def llama_config(model: ModelConfig) -> LlamaConfig:
    return LlamaConfig(**sizes_of(model), attention_bias=model.heads.bias, mlp_bias=model.mlp.bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def norm_in_its_type(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of an RMSNorm, which is float32 in transformers whatever the model's type."""
    return rms_norm(x, self.weight, self.variance_epsilon)
