"""Key and shape of every tensor of a checkpoint, under the names that the engines read.

Targets and standalone drafters have Hugging Face's names, EAGLE heads those of the EAGLE repository, MTP modules those
of DeepSeek-V3 under `modules.k`, drafters on the target's KV those of Gemma 4's assistants, and block drafters those
of DFlash and DeepSpec.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specsim.core.block import BlockDrafterConfig
from specsim.core.drafter import BLOCK_KINDS, DrafterConfig
from specsim.core.eagle import Eagle3Config, EagleConfig
from specsim.core.frozen_kv import FrozenKVConfig
from specsim.core.mtp import MtpConfig
from specsim.core.p_eagle import PEagleConfig
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.layer_layout import Layout, attention_layout, layer_layout, mlp_layout

_QUERY = ("q_proj", "q_norm", "o_proj", "sinks")  # parts of an attention without keys and values


class DrafterLayout(NamedTuple):
    """Required and optional tensors of a drafter."""

    required: Layout
    optional: Layout


def target_layout(config: ModelConfig) -> Layout:
    """List the tensors of a target, with lm_head.weight even where it is tied to the embedding."""
    table = (config.vocab_size, config.hidden_size)
    layout = {"model.embed_tokens.weight": table, "model.norm.weight": (config.hidden_size,), "lm_head.weight": table}
    for index, layer in enumerate(config.layers):
        name = f"model.layers.{index}"
        layout |= _norms(name, config, "input_layernorm", "post_attention_layernorm")
        layout |= layer_layout(name, layer, config.hidden_size, config.hidden_size)
    return layout


def drafter_layout(config: DrafterConfig) -> DrafterLayout:
    """List the tensors of a drafter of any kind."""
    return _LAYOUTS[config.kind](config)


def _eagle_layout(config: EagleConfig) -> DrafterLayout:
    """List EAGLE-1/2's tensors: fc of embedding and feature, then Llama layers, the first without input norm."""
    model = config.model
    width = model.hidden_size
    layout: Layout = {"embed_tokens.weight": (model.vocab_size, width), "fc.weight": (width, 2 * width)}
    for index, layer in enumerate(model.layers):
        name = f"layers.{index}"
        layout |= _norms(name, model, *(["input_layernorm"] if index else []), "post_attention_layernorm")
        layout |= layer_layout(name, layer, width, width)
    return DrafterLayout(layout, {"fc.bias": (width,)})


def _eagle3_layout(config: Eagle3Config) -> DrafterLayout:
    """List EAGLE-3's tensors: fc of target features, one layer, a head, and the norms of EAGLE-3.1 before fc.

    The layer's attention reads embedding and feature together.
    """
    model = config.model
    width = model.hidden_size
    draft_vocab_size = config.draft_vocab_size
    num_features = len(config.feature_layers)
    fused = num_features * config.target_hidden_size
    layout: Layout = {"fc.weight": (width, fused), "norm.weight": (width,)}
    layout["lm_head.weight"] = (draft_vocab_size, width)
    if config.norm_before_fc:
        layout["input_norm.weight"] = (fused,)
    if config.fc_norm:
        layout |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(num_features)}
    layout |= _norms("midlayer", model, "hidden_norm", "input_layernorm", "post_attention_layernorm")
    layout |= layer_layout("midlayer", model.layers[0], width, 2 * width)
    for index in range(1, model.num_layers):  # of P-EAGLE
        layout |= _norms(f"layers.{index}", model, "input_layernorm", "post_attention_layernorm")
        layout |= layer_layout(f"layers.{index}", model.layers[index], width, width)
    embedding: Layout = {"embed_tokens.weight": (model.vocab_size, width)}
    d2t: Layout = {"d2t": (draft_vocab_size,)}
    t2d: Layout = {"t2d": (model.vocab_size,)}
    has_embedding = width != config.target_hidden_size
    has_vocabulary = draft_vocab_size != model.vocab_size
    required = layout | (embedding if has_embedding else {}) | (d2t if has_vocabulary else {})
    return DrafterLayout(required, embedding | d2t | t2d)


def _p_eagle_layout(config: PEagleConfig) -> DrafterLayout:
    """List the tensors of an EAGLE-3 head of one or more layers, with the features that its mask rows read.

    A head with its target's width and vocabulary may read out by its target's lm_head, as in vllm-project/vllm.
    """
    required, optional = _eagle3_layout(config)
    model = config.model
    head: Layout = {}
    if (model.hidden_size, config.draft_vocab_size) == (config.target_hidden_size, model.vocab_size):
        head["lm_head.weight"] = required.pop("lm_head.weight")
    return DrafterLayout(required | {"mask_hidden": required["fc.weight"][1:]}, optional | head)


def _mtp_layout(config: MtpConfig) -> DrafterLayout:
    """List the tensors of MTP modules, whose eh_proj reads the normed embedding and the normed hidden state.

    Embedding and head are the target's.
    """
    model = config.model
    width = model.hidden_size
    layout: Layout = {}
    for index in range(config.num_modules):
        module = f"modules.{index}"
        layout |= _norms(module, model, "enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "norm")
        layout[f"{module}.eh_proj.weight"] = (width, 2 * width)
        layout |= layer_layout(module, model.layers[index], width, width)
    return DrafterLayout(layout, {})


def _frozen_kv_layout(config: FrozenKVConfig) -> DrafterLayout:
    """List the tensors of a drafter whose layers have queries only, as keys and values are the target's.

    pre_projection reads the target's embedding and hidden state, post_projection makes a hidden state of that width.
    """
    model = config.model
    width = model.hidden_size
    target_width = config.target_hidden_size
    layout: Layout = {"pre_projection.weight": (width, 2 * target_width), "norm.weight": (width,)}
    layout |= {"post_projection.weight": (target_width, width), "lm_head.weight": (config.draft_vocab_size, width)}
    for index, layer in enumerate(model.layers):
        name = f"layers.{index}"
        layout |= _norms(name, model, "input_layernorm", "post_attention_layernorm")
        attention = attention_layout(name, layer.attention, width, width)
        layout |= {key: shape for key, shape in attention.items() if key.split(".")[3] in _QUERY}
        layout |= mlp_layout(name, layer.mlp, width)
    return DrafterLayout(layout, {})


def _standalone_layout(config: StandaloneConfig) -> DrafterLayout:
    """List the tensors of a whole language model, as of a target, with a head for the draft vocabulary."""
    layout = target_layout(config.model)
    layout["lm_head.weight"] = (config.draft_vocab_size, config.model.hidden_size)
    table = {"d2t": (config.draft_vocab_size,)}
    has_vocabulary = config.draft_vocab_size != config.model.vocab_size
    return DrafterLayout(layout | (table if has_vocabulary else {}), table | {"t2d": (config.model.vocab_size,)})


def _block_layout(config: BlockDrafterConfig) -> DrafterLayout:
    """List the tensors of a block drafter, which has a head if it has a vocabulary of its own.

    fc reads the target's features, which every layer's keys and values are made of. The Markov head embeds target ids.
    """
    model = config.model
    width = model.hidden_size
    block = config.block
    layout: Layout = {"fc.weight": (width, len(config.feature_layers) * config.target_hidden_size)}
    layout |= {"hidden_norm.weight": (width,), "norm.weight": (width,)}
    for index, layer in enumerate(model.layers):
        name = f"layers.{index}"
        layout |= _norms(name, model, "input_layernorm", "post_attention_layernorm")
        layout |= layer_layout(name, layer, width, width)
    if block.markov_rank:
        layout["markov_head.markov_w1.weight"] = (model.vocab_size, block.markov_rank)
        layout["markov_head.markov_w2.weight"] = (config.draft_vocab_size, block.markov_rank)
    if block.confidence != "none":
        read = width + (block.markov_rank if block.confidence == "hidden_and_token" else 0)
        layout |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
    embedding: Layout = {"embed_tokens.weight": (model.vocab_size, width)}
    head: Layout = {"lm_head.weight": (config.draft_vocab_size, width)}
    d2t: Layout = {"d2t": (config.draft_vocab_size,)}
    has_vocabulary = config.draft_vocab_size != model.vocab_size
    is_other_width = width != config.target_hidden_size
    layout |= embedding if is_other_width else {}
    layout |= head if is_other_width or has_vocabulary else {}
    layout |= d2t if has_vocabulary else {}
    return DrafterLayout(layout, embedding | head | d2t | {"t2d": (model.vocab_size,)})


_LAYOUTS: Mapping[str, Callable[[Any], DrafterLayout]] = {
    **dict.fromkeys(BLOCK_KINDS, _block_layout),
    "eagle": _eagle_layout,
    "eagle3": _eagle3_layout,
    "p-eagle": _p_eagle_layout,
    "mtp": _mtp_layout,
    "frozen-kv": _frozen_kv_layout,
    "standalone": _standalone_layout,
}


def _norms(layer: str, config: ModelConfig, *names: str) -> Layout:
    return {f"{layer}.{name}.weight": (config.hidden_size,) for name in names}
