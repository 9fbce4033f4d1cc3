"""Llama layers for drafters whose target has layers of another kind, as published EAGLE heads have them."""

from dataclasses import replace

from specsim.core.target import MLP, Attention, DenseMLP, HeadAttention, LatentAttention, LayerConfig, Rope


def llama_layer(of: LayerConfig, hidden_size: int, theta: float = 10000.0) -> LayerConfig:
    """Make a Llama layer of another layer's sizes, without window, with a rotary base of its own."""
    heads = _heads(of.attention, hidden_size)
    rope = Rope(theta, heads.head_dim)
    return LayerConfig(HeadAttention(heads.num_heads, heads.num_kv_heads, heads.head_dim, rope), _dense(of.mlp))


def dense_layer(of: LayerConfig, hidden_size: int, with_latent: bool = False) -> LayerConfig:
    """Return a dense layer as it is, and for any other the Llama layer with its window and rotary base.

    with_latent: a layer of latent attention only gets a dense MLP, as in the EAGLE heads that have such attention.
    """
    if with_latent and isinstance(of.attention, LatentAttention):
        return LayerConfig(of.attention, _dense(of.mlp))
    if isinstance(of.mlp, DenseMLP) and isinstance(of.attention, HeadAttention) and not of.attention.has_sinks:
        return of
    layer = llama_layer(of, hidden_size, of.attention.rope.theta)
    return replace(layer, attention=replace(layer.attention, window=of.attention.window))


def _heads(attention: Attention, hidden_size: int) -> HeadAttention:
    """Return heads as they are, for latent attention KV heads that are together as wide as hidden states."""
    if isinstance(attention, HeadAttention):
        return attention
    num_kv_heads = max(1, attention.num_heads // 2)
    return HeadAttention(attention.num_heads, num_kv_heads, hidden_size // num_kv_heads, attention.rope)


def _dense(mlp: MLP) -> DenseMLP:
    """Make a dense MLP as wide as the experts of one row together."""
    return DenseMLP(mlp.size if isinstance(mlp, DenseMLP) else mlp.top_k * mlp.size + (mlp.shared_size or 0))
