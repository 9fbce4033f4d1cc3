"""The target protocol, which is everything that a round needs of a target model, and a model's shape."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from specsim.core.errors import require, require_choice
from specsim.core.pool import KVBuffer, KVLayout

FAMILIES = ("llama", "qwen3", "mistral")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder, from its config.json."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    sliding_windows: tuple[int | None, ...] = ()  # by layer, keys that a query sees, itself included; None: all
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_choice("model_type", self.family, FAMILIES)
        allowed = f"a divisor of num_attention_heads, {self.num_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "num_key_value_heads", self.num_kv_heads, allowed)

    @property
    def kv_layout(self) -> KVLayout:
        """Shape of the model's KV."""
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim)

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, itself included, None for all."""
        return self.sliding_windows[layer] if self.sliding_windows else None


class Target(Protocol):
    """A target model of one implementation, with that implementation's attention metadata."""

    config: ModelConfig

    @property
    def embedding(self) -> torch.Tensor:
        """Token embeddings, [V, H]."""
        ...

    def forward(
        self, input_ids_R: torch.Tensor, metadata: Any, kv: KVBuffer, feature_layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run rows through the model and write their KV.

        Returns (hidden [R, H] that the head reads, features [R, F]). Features are the hidden states entering
        `feature_layers`, concatenated, or that same hidden when there are none.
        """
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute logits, [R, V] in the model's dtype."""
        ...
