"""Key and shape of every tensor of a checkpoint, named as by Hugging Face or, for heads, the EAGLE repository."""

from typing import NamedTuple

from specsim.core.drafter import DrafterConfig
from specsim.core.target import ModelConfig

Layout = dict[str, tuple[int, ...]]


class DrafterLayout(NamedTuple):
    """Required and optional tensors of an EAGLE head."""

    required: Layout
    optional: Layout


def target_layout(config: ModelConfig) -> Layout:
    """List the tensors of a target, with lm_head.weight even where it is tied to the embedding."""
    table = (config.vocab_size, config.hidden_size)
    layout = {"model.embed_tokens.weight": table, "model.norm.weight": (config.hidden_size,), "lm_head.weight": table}
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        layout |= _norms(layer, config, "input_layernorm", "post_attention_layernorm")
        layout |= _attention(layer, config, config.hidden_size) | _mlp(layer, config)
    return layout


def drafter_layout(config: DrafterConfig) -> DrafterLayout:
    """List the tensors of an EAGLE head."""
    return _eagle3_layout(config) if config.kind == "eagle3" else _eagle_layout(config.model)


def _eagle_layout(model: ModelConfig) -> DrafterLayout:
    """List EAGLE-1/2's tensors: fc of embedding and feature, then Llama layers, the first without input norm."""
    width = model.hidden_size
    layout: Layout = {"embed_tokens.weight": (model.vocab_size, width), "fc.weight": (width, 2 * width)}
    for index in range(model.num_layers):
        layer = f"layers.{index}"
        layout |= _norms(layer, model, *(["input_layernorm"] if index else []), "post_attention_layernorm")
        layout |= _attention(layer, model, width) | _mlp(layer, model)
    return DrafterLayout(layout, {"fc.bias": (width,)})


def _eagle3_layout(config: DrafterConfig) -> DrafterLayout:
    """List EAGLE-3's tensors: fc of three target features, one layer, a head.

    The layer's attention reads embedding and feature together.
    """
    model = config.model
    width = model.hidden_size
    draft_vocab_size = config.draft_vocab_size
    layout: Layout = {"fc.weight": (width, 3 * config.target_hidden_size), "norm.weight": (width,)}
    layout["lm_head.weight"] = (draft_vocab_size, width)
    layout |= _norms("midlayer", model, "hidden_norm", "input_layernorm", "post_attention_layernorm")
    layout |= _attention("midlayer", model, 2 * width) | _mlp("midlayer", model)
    embedding: Layout = {"embed_tokens.weight": (model.vocab_size, width)}
    d2t: Layout = {"d2t": (draft_vocab_size,)}
    t2d: Layout = {"t2d": (model.vocab_size,)}
    has_embedding = width != config.target_hidden_size
    has_vocabulary = draft_vocab_size != model.vocab_size
    required = layout | (embedding if has_embedding else {}) | (d2t if has_vocabulary else {})
    return DrafterLayout(required, embedding | d2t | t2d)


def _norms(layer: str, config: ModelConfig, *names: str) -> Layout:
    return {f"{layer}.{name}.weight": (config.hidden_size,) for name in names}


def _attention(layer: str, config: ModelConfig, width: int) -> Layout:
    """List the projections of one attention with an input of `width` features, and Qwen3's query and key norms."""
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    shapes = {"q_proj": (query, width), "k_proj": (key, width), "v_proj": (key, width)}
    shapes["o_proj"] = (config.hidden_size, query)
    layout = _linears(f"{layer}.self_attn", shapes, config.attention_bias)
    if config.family == "qwen3":
        layout |= {f"{layer}.self_attn.{name}.weight": (config.head_dim,) for name in ("q_norm", "k_norm")}
    return layout


def _mlp(layer: str, config: ModelConfig) -> Layout:
    up = (config.intermediate_size, config.hidden_size)
    down = (config.hidden_size, config.intermediate_size)
    return _linears(f"{layer}.mlp", {"gate_proj": up, "up_proj": up, "down_proj": down}, config.mlp_bias)


def _linears(module: str, shapes: Layout, bias: bool) -> Layout:
    layout: Layout = {f"{module}.{name}.weight": shape for name, shape in shapes.items()}
    return layout | ({f"{module}.{name}.bias": shape[:1] for name, shape in shapes.items()} if bias else {})
