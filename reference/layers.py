"""Parts of a decoder layer, as functions over tensors found by name."""

import math
from collections.abc import Mapping

import torch
from torch.nn.functional import linear, silu

from specsim.core.pool import KVBuffer
from specsim.core.target import HeadAttention, ModelConfig, Rope
from specsim.reference.attention import AttentionMetadata, Scores, attention


class Weights:
    """Tensors whose names share a prefix."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        self._tensors = tensors
        self._prefix = prefix

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[self._prefix + name]

    def get(self, name: str) -> torch.Tensor | None:
        """Find a tensor by name, None if there is none."""
        return self._tensors.get(self._prefix + name)

    def under(self, prefix: str) -> "Weights":
        """Extend the prefix."""
        return Weights(self._tensors, f"{self._prefix}{prefix}.")

    def project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Compute x Wᵀ (+ bias) with the named projection."""
        return linear(x, self[f"{name}.weight"], self.get(f"{name}.bias"))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute x / √(mean x² + eps) · weight, in float32 or wider (Zhang & Sennrich 2019)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """Rotary frequencies θ^(-2i/D), f32 [D/2].

    Rope type llama3 stretches long wavelengths (Llama 3.1), yarn those that rotate less than beta_slow times in the
    original context, and partly those that rotate less than beta_fast times (arXiv 2309.00071).
    """
    base = rope.theta ** (torch.arange(0, rope.size, 2).float() / rope.size)
    inverse = 1.0 / base
    scaling = rope.scaling
    if scaling.get("rope_type", "default") == "default":
        return inverse
    factor = scaling["factor"]
    if scaling["rope_type"] == "yarn":
        share = 1 - _stretched_share(rope)
        return share * inverse + (1 - share) * (1.0 / (factor * base))
    low = scaling["low_freq_factor"]
    high = scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    share = ((rotations - low) / (high - low)).clamp(0, 1)
    return share * inverse + (1 - share) * inverse / factor


def _stretched_share(rope: Rope) -> torch.Tensor:
    """Share of each wavelength's stretching in YaRN, f32 [D/2]: a ramp between two numbers of rotations."""
    scaling = rope.scaling
    context = scaling["original_max_position_embeddings"]

    def pair(rotations: float) -> float:
        return rope.size * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = pair(scaling["beta_fast"])
    high = pair(scaling["beta_slow"])
    if scaling["truncate"]:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, rope.size - 1)
    width = 0.001 if low == high else high - low
    return ((torch.arange(rope.size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)


def rotate(
    x_RAD: torch.Tensor, positions_R: torch.Tensor, inverse_D: torch.Tensor, rope: Rope | None = None
) -> torch.Tensor:
    """Apply rotary embedding (arXiv 2104.09864) to the first channels, with angles in float32 as in training.

    Pairs are (i, i + D/2), or (2i, 2i + 1) where the rope is interleaved.
    """
    angles = positions_R[:, None, None].float() * inverse_D
    amplitude = 1.0 if rope is None else rope.amplitude
    cos = (angles.cos() * amplitude).to(x_RAD.dtype)
    sin = (angles.sin() * amplitude).to(x_RAD.dtype)
    size = 2 * len(inverse_D)
    turned, rest = x_RAD[..., :size], x_RAD[..., size:]
    if rope is not None and rope.interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, rest], dim=-1)


def self_attention(
    x_RH: torch.Tensor,
    weights: Weights,
    config: ModelConfig,
    inverse_D: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
) -> torch.Tensor:
    """Project, normalise each head where there is a norm, rotate, write KV, attend, project back: [R, H]."""
    shape = config.layers[layer].attention
    assert isinstance(shape, HeadAttention)
    query, key, value = (weights.project(x_RH, f"{part}_proj").unflatten(-1, (-1, shape.head_dim)) for part in "qkv")
    if weights.get("q_norm.weight") is not None:
        query = rms_norm(query, weights["q_norm.weight"], config.rms_norm_eps)
        key = rms_norm(key, weights["k_norm.weight"], config.rms_norm_eps)
    query = rotate(query, metadata.positions, inverse_D, shape.rope)
    key = rotate(key, metadata.positions, inverse_D, shape.rope)
    kv.write(layer, metadata.slots, key, value)
    scores = Scores(shape.window, weights.get("sinks"), first_columns=shape.first_columns)
    attended = attention(query, layer, kv, metadata, scores)
    return weights.project(attended.flatten(1), "o_proj")


def query_attention(
    query_RAD: torch.Tensor,
    inverse_D: torch.Tensor,
    layer: int,
    kv: KVBuffer,
    metadata: AttentionMetadata,
    shape: HeadAttention,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Rotate queries and attend to a layer's KV, to which nothing is written: [R, A·D]."""
    query = rotate(query_RAD, metadata.positions, inverse_D, shape.rope)
    return attention(query, layer, kv, metadata, Scores(shape.window, sinks)).flatten(1)


def gated_mlp(x_RH: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Compute down(silu(gate x) · up x) (arXiv 2002.05202)."""
    return weights.project(silu(weights.project(x_RH, "gate_proj")) * weights.project(x_RH, "up_proj"), "down_proj")
