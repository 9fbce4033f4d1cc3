"""The target protocol, which is everything that a round needs of a target model, and a model's shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from specsim.core.errors import InputError, require, require_choice
from specsim.core.layer_config import DenseMLP, Experts, HeadAttention, LayerConfig, Rope
from specsim.core.pool import KVBuffer, KVLayout

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt_oss", "qwen3_moe", "deepseek_v3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder, from its config.json.

    Properties that name one size of all layers raise InputError where layers differ or have no such size.
    """

    family: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    layers: tuple[LayerConfig, ...]
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require_choice("model_type", self.family, FAMILIES)
        require(len(self.layers) > 0, "num_hidden_layers", 0, "at least 1")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def heads(self) -> HeadAttention:
        """Attention of every layer, without its window."""
        first = _without_window(self.layers[0].attention)
        is_one = all(_without_window(layer.attention) == first for layer in self.layers)
        if not is_one or not isinstance(first, HeadAttention):
            raise InputError("model_type", self.family, "a model whose layers all have keys and values of equal heads")
        return first

    @property
    def num_heads(self) -> int:
        return self.heads.num_heads

    @property
    def num_kv_heads(self) -> int:
        return self.heads.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.heads.head_dim

    @property
    def rope(self) -> Rope:
        """Rotary embedding of every layer."""
        first = self.layers[0].attention.rope
        if any(layer.attention.rope != first for layer in self.layers):
            raise InputError("model_type", self.family, "a model with one rotary embedding")
        return first

    @property
    def mlp(self) -> DenseMLP:
        """Dense MLP of every layer."""
        first = self.layers[0].mlp
        if not isinstance(first, DenseMLP) or any(layer.mlp != first for layer in self.layers):
            raise InputError("model_type", self.family, "a model whose layers all have dense MLPs of one size")
        return first

    @property
    def intermediate_size(self) -> int:
        return self.mlp.size

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Layers with routed experts."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mlp, Experts))

    @property
    def side_outputs(self) -> dict[str, tuple[int, ...]]:
        """Shape of one row of each side output: `experts` [expert layers, top_k]."""
        chosen = {layer.mlp.top_k for layer in self.layers if isinstance(layer.mlp, Experts)}
        if len(chosen) > 1:
            raise InputError("num_experts_per_tok", sorted(chosen), "one number for all layers")
        return {"experts": (len(self.expert_layers), chosen.pop())} if chosen else {}

    @property
    def kv_layout(self) -> KVLayout:
        """Shape of the model's KV."""
        layouts = {layer.attention.kv_layout(self.num_layers) for layer in self.layers}
        if len(layouts) > 1:
            raise InputError("model_type", self.family, "a model whose layers have KV of one shape")
        return layouts.pop()

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Keys that a query sees, itself included, by layer; None: all."""
        return tuple(layer.attention.window for layer in self.layers)

    def window(self, layer: int) -> int | None:
        """Keys that a query of this layer sees, itself included, None for all."""
        return self.layers[layer].attention.window

    def with_heads(self, **changes: Any) -> "ModelConfig":
        """Replace fields of the attention of every layer, which has keys and values for each head."""
        if not all(isinstance(layer.attention, HeadAttention) for layer in self.layers):
            raise InputError("model_type", self.family, "a model whose layers all have keys and values of heads")
        layers = tuple(replace(layer, attention=replace(layer.attention, **changes)) for layer in self.layers)
        return replace(self, layers=layers)

    def with_windows(self, windows: Sequence[int | None]) -> "ModelConfig":
        """Replace the window of every layer."""
        layers = []
        for layer, window in zip(self.layers, windows, strict=True):
            if isinstance(layer.attention, HeadAttention):
                layer = replace(layer, attention=replace(layer.attention, window=window))
            require(layer.attention.window == window, "sliding_window", window, "none where attention is latent")
            layers.append(layer)
        return replace(self, layers=tuple(layers))


def _without_window(attention: Any) -> Any:
    return replace(attention, window=None) if isinstance(attention, HeadAttention) else attention


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Results of a target's forward over R rows."""

    hidden: torch.Tensor  # [R, H], what the head reads
    features: torch.Tensor  # [R, F], hidden states entering the feature layers, or `hidden` where there are none
    # By name, one row for each row of the forward: `experts` is i16 [R, expert layers, top_k].
    side: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Target(Protocol):
    """A target model of one implementation, with that implementation's attention metadata."""

    config: ModelConfig

    @property
    def embedding(self) -> torch.Tensor:
        """Token embeddings, [V, H]."""
        ...

    def forward(
        self, input_ids_R: torch.Tensor, metadata: Any, kv: KVBuffer, feature_layers: tuple[int, ...]
    ) -> ForwardOutput:
        """Run rows through the model and write their KV.

        Features are the hidden states entering `feature_layers`, concatenated, or what the head reads if there are
        none.
        """
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Compute logits, [R, V] in the model's dtype."""
        ...
