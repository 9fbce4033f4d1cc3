"""Tensors of a target, under Hugging Face's names, and of a drafter, as in its format: key and shape."""

from specsim.core.drafter import DrafterConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import DrafterLayout, format_of
from specsim.models.checkpoint.layer_layout import Layout, layer_layout, norm_layout


def target_layout(config: ModelConfig) -> Layout:
    """List the tensors of a target, with lm_head.weight even where it is tied to the embedding."""
    table = (config.vocab_size, config.hidden_size)
    layout = {"model.embed_tokens.weight": table, "model.norm.weight": (config.hidden_size,), "lm_head.weight": table}
    for index, layer in enumerate(config.layers):
        name = f"model.layers.{index}"
        layout |= norm_layout(name, config.hidden_size, "input_layernorm", "post_attention_layernorm")
        layout |= layer_layout(name, layer, config.hidden_size, config.hidden_size)
    return layout


def drafter_layout(config: DrafterConfig) -> DrafterLayout:
    """List the tensors of a drafter of any kind."""
    return format_of(config.kind).layout(config)
