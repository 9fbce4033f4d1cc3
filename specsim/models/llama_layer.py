"""Llama layers for drafters whose target has layers of another kind, as published EAGLE heads have them."""

from dataclasses import replace

from specsim.core.layer_config import MLP, Attention, DenseMLP, HeadAttention, LayerConfig, Rope


def llama_layer(of: LayerConfig, theta: float = 10000.0) -> LayerConfig:
    """Make a Llama layer of another layer's sizes, without window, with a rotary base of its own."""
    heads = _heads(of.attention)
    rope = Rope(theta, heads.head_dim)
    return LayerConfig(HeadAttention(heads.num_heads, heads.num_kv_heads, heads.head_dim, rope), _dense(of.mlp))


def dense_layer(of: LayerConfig) -> LayerConfig:
    """Return a dense layer as it is, and for any other the Llama layer with its window and rotary base."""
    if isinstance(of.mlp, DenseMLP) and isinstance(of.attention, HeadAttention) and not of.attention.has_sinks:
        return of
    made = llama_layer(of, of.attention.rope.theta)
    return replace(made, attention=replace(made.attention, window=of.attention.window))


def _heads(attention: Attention) -> HeadAttention:
    if isinstance(attention, HeadAttention):
        return attention
    size = attention.nope_dim + attention.rope_dim
    return HeadAttention(attention.num_heads, attention.num_heads, size, attention.rope)


def _dense(mlp: MLP) -> DenseMLP:
    """Make a dense MLP as wide as the experts of one row together."""
    return DenseMLP(mlp.size if isinstance(mlp, DenseMLP) else mlp.top_k * mlp.size + (mlp.shared_size or 0))
