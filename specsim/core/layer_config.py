"""Records that describe one decoder layer: rotary embedding, attention and MLP.

Their tensors are listed in models/checkpoint/layout.py. A layer with recurrent state would be a further record.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specsim.core.errors import require, require_choices
from specsim.core.kv_buffer import KVLayout

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

    @property
    def window(self) -> None:
        """Keys that a query sees: all."""
        return None

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
