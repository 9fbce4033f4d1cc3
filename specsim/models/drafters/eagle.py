"""EAGLE-1/2 heads, as the EAGLE repository writes them, and the fields that heads of later versions share with them.

Tensors: embed_tokens, fc [H, 2H], fc.bias where it has one, layers.i.*, the first without input norm.

The layers are of the kind that `model_type` names. Classes for Llama (SafeAILab/EAGLE, SpecForge and SGLang) have its
layers whatever model their config.json was copied from. Latent attention comes with a dense MLP, as in SGLang.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from specsim.core.drafter import DrafterConfig
from specsim.core.eagle import EagleConfig
from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import DrafterFormat, DrafterLayout
from specsim.models.checkpoint.drafter_layers import windows_of
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import Layout, layer_layout, norm_layout
from specsim.models.checkpoint.model_config import model_config, target_sizes
from specsim.models.checkpoint.weights import Stored, by_name, check_layout

_NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # of version 3.1
_KINDS = ("llama", "qwen2", "qwen3", "deepseek_v3")  # of layers
_COPIED = ("phi3",)  # other models whose config.json heads of Llama layers were copied from
_LLAMA_CLASSES = r"\w*Llama\w*|PEagleDraftModel"
_EXPERTS = ("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")
# Fields of eagle_config with the value of the forward that we have, None: read elsewhere or of no effect.
_EAGLE_CONFIG = {
    **dict.fromkeys(("eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_convention", "num_aux_hidden_states")),
    **dict.fromkeys(("use_aux_hidden_state", *_NORMS)),
    "parallel_draft_step": 1,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
}


class HeadFields(NamedTuple):
    """Fields of a head of any version."""

    fields: Fields  # with those of `eagle_config`
    model: ModelConfig  # of its layers
    norms: dict[str, bool]  # of version 3.1


def read_head(fields: Fields, target: ModelConfig) -> HeadFields:
    """Read the layers and norms of a head, from a config.json of the EAGLE repository, SGLang or speculators."""
    is_of_speculators = bool(fields.get("speculators_model_type"))
    layer = fields.mapping("transformer_layer_config") if is_of_speculators else fields
    nested = fields.mapping("eagle_config")
    for name, value in nested.non_null.items():
        allowed = f"a field of {', '.join(_EAGLE_CONFIG)}, or a flag that is false"
        require(name in _EAGLE_CONFIG or value is False, f"eagle_config in {fields.file}", name, allowed)
        if _EAGLE_CONFIG.get(name) not in (None, value):
            raise nested.error(name, f"{_EAGLE_CONFIG[name]}, as no other head is read")
    fields = fields.filled(nested.non_null)
    if not fields.flag("use_aux_hidden_state", default=True):
        raise fields.error("use_aux_hidden_state", "true, as no head is read that has no fc over features")
    model = model_config(_inherit(layer, target, not is_of_speculators and _is_llama(fields)))
    model = model.with_windows(windows_of(layer, model))
    return HeadFields(fields, model, {name: fields.flag(name) for name in _NORMS})


def _is_llama(fields: Fields) -> bool:
    """Check whether the class of a head is one of Llama layers."""
    classes = fields.get("architectures")
    return isinstance(classes, list) and any(re.fullmatch(_LLAMA_CLASSES, str(name)) for name in classes)


def check_fit(config: DrafterConfig, target: ModelConfig, file: Path) -> None:
    """Check that a head has its target's vocabulary and width."""
    model = config.model
    width = config.target_hidden_size
    if model.vocab_size != target.vocab_size:
        raise InputError(f"vocab_size in {file}", model.vocab_size, f"{target.vocab_size}, the target's")
    name = "hidden_size" if width == model.hidden_size else "target_hidden_size"
    require(width == target.hidden_size, f"{name} in {file}", width, f"{target.hidden_size}, the target's hidden_size")
    if config.draft_vocab_size > target.vocab_size:
        allowed = f"at most {target.vocab_size}, the target's vocab_size"
        raise InputError(f"draft_vocab_size in {file}", config.draft_vocab_size, allowed)


def _inherit(layer: Fields, target: ModelConfig, is_llama: bool) -> Fields:
    """Complete a head's fields with its target's.

    RoPE is not the target's: published heads that do not name it were trained with the default base of 10000.
    """
    family = layer.choice("model_type", (*_KINDS, *_COPIED) if is_llama else _KINDS, default="llama")
    values = {"num_hidden_layers": 1, **target_sizes(layer, target), **layer.non_null}
    values["model_type"] = "llama" if is_llama else family
    for name in ("layer_types", "use_sliding_window"):  # which `windows_of` reads
        values.pop(name, None)
    if values["model_type"] == "deepseek_v3":
        values |= {"first_k_dense_replace": values["num_hidden_layers"]} | dict.fromkeys(_EXPERTS)
    return Fields(layer.file, values, layer.read_names)


def _matches(fields: Fields, names: Collection[str], is_wanted: bool) -> bool:
    return "fc.weight" in names


def _layout(config: EagleConfig) -> DrafterLayout:
    """List the tensors: fc of embedding and feature, then layers, the first without input norm."""
    model = config.model
    width = model.hidden_size
    layout: Layout = {"embed_tokens.weight": (model.vocab_size, width), "fc.weight": (width, 2 * width)}
    for index, layer in enumerate(model.layers):
        name = f"layers.{index}"
        layout |= norm_layout(name, width, *(["input_layernorm"] if index else []), "post_attention_layernorm")
        layout |= layer_layout(name, layer, width, width)
    return DrafterLayout(layout, {"fc.bias": (width,)})


def _load(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    folder = fields.file.parent
    config = read_config(fields, target)
    required, optional = _layout(config)
    if fields.get("bias") is not None:
        bias = {"fc.bias": optional.pop("fc.bias")}
        required |= bias if fields.flag("bias") else {}
    named = by_name(stored, lambda key: key.removeprefix("model."))
    return DrafterCheckpoint(config, check_layout(named, folder, required, optional))


def read_config(fields: Fields, target: ModelConfig) -> EagleConfig:
    """Read the shape of a head, and check that it fits its target."""
    head = read_head(fields, target)
    if any(head.norms.values()):
        allowed = "false, except in an EAGLE-3 or P-EAGLE head"
        raise head.fields.error(next(filter(head.norms.get, head.norms)), allowed)
    model = head.model
    config = EagleConfig(model, draft_vocab_size=model.vocab_size, target_hidden_size=model.hidden_size)
    check_fit(config, target, fields.file)
    return config


FORMAT = DrafterFormat(precedence=5, matches=_matches, load=_load, layout=_layout)
