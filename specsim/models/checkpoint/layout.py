"""Key and shape of every tensor of a layer and of a target, under our names."""

from specsim.core.target import (
    MLP,
    Attention,
    DenseMLP,
    Experts,
    HeadAttention,
    LatentAttention,
    LayerConfig,
    ModelConfig,
)

Layout = dict[str, tuple[int, ...]]


def layer_layout(name: str, layer: LayerConfig, hidden_size: int, width: int) -> Layout:
    """List the tensors of a layer's attention, whose input has `width` features, and of its MLP."""
    return attention_layout(name, layer.attention, hidden_size, width) | mlp_layout(name, layer.mlp, hidden_size)


def norm_layout(name: str, width: int, *norms: str) -> Layout:
    """List the weights of a layer's norms."""
    return {f"{name}.{norm}.weight": (width,) for norm in norms}


def attention_layout(name: str, attention: Attention, hidden_size: int, width: int) -> Layout:
    """List the tensors of a layer's attention."""
    module = f"{name}.self_attn"
    if isinstance(attention, LatentAttention):
        return _latent(module, attention, hidden_size, width)
    return _heads(module, attention, hidden_size, width)


def mlp_layout(name: str, mlp: MLP, hidden_size: int) -> Layout:
    """List the tensors of a layer's MLP."""
    if isinstance(mlp, DenseMLP):
        return _gated(f"{name}.mlp", mlp.size, hidden_size, mlp.bias)
    return _experts(f"{name}.mlp", mlp, hidden_size)


def _heads(module: str, attention: HeadAttention, hidden_size: int, width: int) -> Layout:
    query = attention.num_heads * attention.head_dim
    key = attention.num_kv_heads * attention.head_dim
    shapes = {"q_proj": (query, width), "k_proj": (key, width), "v_proj": (key, width)}
    layout = _linears(module, shapes, attention.bias)
    layout |= _linears(module, {"o_proj": (hidden_size, query)}, attention.output_bias)
    if attention.has_head_norms:
        layout |= {f"{module}.{part}.weight": (attention.head_dim,) for part in ("q_norm", "k_norm")}
    return layout | ({f"{module}.sinks": (attention.num_heads,)} if attention.has_sinks else {})


def _latent(module: str, attention: LatentAttention, hidden_size: int, width: int) -> Layout:
    """List the tensors of latent attention; kv_b_proj makes each head's key without position, then its value."""
    query = attention.num_heads * (attention.nope_dim + attention.rope_dim)
    rank = attention.query_rank
    latent = attention.latent_rank
    value = attention.num_heads * attention.value_dim
    layout: Layout = {f"{module}.kv_a_layernorm.weight": (latent,)}
    layout[f"{module}.kv_b_proj.weight"] = (attention.num_heads * attention.nope_dim + value, latent)
    shapes = {"kv_a_proj_with_mqa": (latent + attention.rope_dim, width), "o_proj": (hidden_size, value)}
    if rank is None:
        layout[f"{module}.q_proj.weight"] = (query, width)
    else:
        layout |= {f"{module}.q_a_layernorm.weight": (rank,), f"{module}.q_b_proj.weight": (query, rank)}
        shapes["q_a_proj"] = (rank, width)
    return layout | _linears(module, shapes, attention.bias)


def _experts(module: str, experts: Experts, hidden_size: int) -> Layout:
    """List the tensors of experts: all of them stacked in one, with the gate's columns before those of up."""
    count = experts.num_experts
    layout: Layout = {f"{module}.router.weight": (count, hidden_size)}
    if experts.router_bias:
        layout[f"{module}.router.bias"] = (count,)
    if experts.routing == "grouped_sigmoid":
        layout[f"{module}.router.correction_bias"] = (count,)
    shapes = {"gate_up_proj": (2 * experts.size, hidden_size), "down_proj": (hidden_size, experts.size)}
    stacked = _linears(f"{module}.experts", shapes, experts.bias)
    layout |= {name: (count, *shape) for name, shape in stacked.items()}
    if experts.shared_size is not None:
        layout |= _gated(f"{module}.shared_experts", experts.shared_size, hidden_size, bias=False)
    return layout


def _gated(module: str, size: int, hidden_size: int, bias: bool) -> Layout:
    up = (size, hidden_size)
    return _linears(module, {"gate_proj": up, "up_proj": up, "down_proj": (hidden_size, size)}, bias)


def _linears(module: str, shapes: Layout, bias: bool) -> Layout:
    layout: Layout = {f"{module}.{name}.weight": shape for name, shape in shapes.items()}
    return layout | ({f"{module}.{name}.bias": shape[:1] for name, shape in shapes.items()} if bias else {})


def target_layout(config: ModelConfig) -> Layout:
    """List the tensors of a target, with lm_head.weight even where it is tied to the embedding."""
    table = (config.vocab_size, config.hidden_size)
    layout = {"model.embed_tokens.weight": table, "model.norm.weight": (config.hidden_size,), "lm_head.weight": table}
    for index, layer in enumerate(config.layers):
        name = f"model.layers.{index}"
        layout |= norm_layout(name, config.hidden_size, "input_layernorm", "post_attention_layernorm")
        layout |= layer_layout(name, layer, config.hidden_size, config.hidden_size)
    return layout
