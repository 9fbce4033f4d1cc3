"""The target protocol, and the shape of a model: its layers with their rotary embedding, attention and MLP."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch

from specsim.core.errors import InputError, require, require_choice, require_choices
from specsim.core.kv_buffer import KVBuffer, KVLayout

Routing = Literal["softmax", "softmax_of_top", "grouped_sigmoid"]
Activation = Literal["silu", "clamped"]


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding of queries and keys."""

    theta: float  # base of the frequencies
    size: int  # channels that are rotated
    scaling: Mapping[str, Any] = field(default_factory=dict)  # rope_type llama3 or yarn with its numbers; {}: none
    interleaved: bool = False  # rotates pairs of channels (2i, 2i+1); False: (i, i + size/2)

    @property
    def amplitude(self) -> float:
        """Factor of cosines and sines, 1 except in YaRN."""
        return self.scaling.get("attention_factor", 1.0)


@dataclass(frozen=True, slots=True)
class HeadAttention:
    """Attention with keys and values for each KV head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None  # keys that a query sees, itself included; None: all
    first_columns: int = 0  # of a request, which a query sees besides its window
    bias: bool = False  # of the projections to queries, keys and values
    output_bias: bool = False
    has_head_norms: bool = False  # RMS norms over each query and key head
    has_sinks: bool = False  # a learned logit of each head joins the softmax, and its weight is dropped

    def __post_init__(self) -> None:
        allowed = f"a divisor of num_attention_heads, {self.num_heads}"
        require(self.num_heads % self.num_kv_heads == 0, "num_key_value_heads", self.num_kv_heads, allowed)

    def kv_layout(self, num_layers: int) -> KVLayout:
        """Shape of the KV of layers with this attention."""
        return KVLayout(num_layers, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose keys and values are projections of one latent vector per token (DeepSeek-V2, arXiv 2405.04434).

    The KV of a token is [normed latent | rotated key], shared by all heads.
    """

    num_heads: int
    query_rank: int | None  # width of the queries' latent vector; None: one projection makes the queries
    latent_rank: int
    nope_dim: int  # channels of each head's query and key without a position
    rope_dim: int  # rotated channels; the key's are shared by all heads
    value_dim: int  # of each head
    scale: float  # of the scores
    rope: Rope
    bias: bool = False  # of the projections to latent vectors and of the output
    window: int | None = None  # as of HeadAttention; checkpoints have none
    first_columns: int = 0  # as of HeadAttention

    def kv_layout(self, num_layers: int) -> KVLayout:
        """Shape of the KV of layers with this attention."""
        return KVLayout(num_layers, 1, self.latent_rank + self.rope_dim, self.latent_rank, values_in_keys=True)


Attention = HeadAttention | LatentAttention


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """Gated MLP: down(silu(gate x) · up x)."""

    size: int  # between up and down
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Gated MLPs, a few for each row as a router chooses them.

    softmax: weights are the chosen probabilities of all experts. softmax_of_top: a softmax over the chosen logits.
    grouped_sigmoid: sigmoids choose with a correction bias, in the best groups, and weigh without it (DeepSeek-V3).
    clamped: gate at most 7 and up in [-7, 7], (up + 1) · gate · sigmoid(1.702 gate) (GPT-OSS).
    """

    num_experts: int
    top_k: int  # experts of a row
    size: int  # of each expert, between up and down
    routing: Routing = "softmax"
    normalise: bool = False  # the chosen weights are divided by their sum
    groups: int = 1  # of equal size, into which experts are divided
    top_groups: int = 1  # groups that a row may choose from
    scaling: float = 1.0  # factor of the weights
    shared_size: int | None = None  # of the expert that every row has besides; None: there is none
    activation: Activation = "silu"
    bias: bool = False  # of the experts' projections
    router_bias: bool = False

    def __post_init__(self) -> None:
        require_choices(self)
        require(self.num_experts % self.groups == 0, "n_group", self.groups, f"a divisor of {self.num_experts} experts")
        require(self.top_groups <= self.groups, "topk_group", self.top_groups, f"at most n_group, {self.groups}")
        most = self.num_experts // self.groups * self.top_groups
        require(1 <= self.top_k <= most, "num_experts_per_tok", self.top_k, f"1 to {most}, the experts to choose from")


MLP = DenseMLP | Experts


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """One pre-norm decoder layer."""

    attention: Attention
    mlp: MLP


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
        """Attention of every layer, without its window and first columns."""
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

    def narrowed(self, window: int, first_columns: int) -> "ModelConfig":
        """Let queries that see more than `window` keys see their last ones and the first columns of the request."""

        def narrow(layer: LayerConfig) -> LayerConfig:
            if layer.attention.window is not None and layer.attention.window <= window:
                return layer
            return replace(layer, attention=replace(layer.attention, window=window, first_columns=first_columns))

        return replace(self, layers=tuple(map(narrow, self.layers)))


def _without_window(attention: Any) -> Any:
    return replace(attention, window=None, first_columns=0) if isinstance(attention, HeadAttention) else attention


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
