"""Shape of an EAGLE head, from a config.json of the EAGLE repository, SGLang or speculators."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from specsim.core.drafter import DrafterConfig
from specsim.core.eagle import Eagle3Config, EagleConfig
from specsim.core.errors import InputError, require
from specsim.core.p_eagle import PEagleConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.inherited import target_sizes
from specsim.models.checkpoint.model_config import model_config

_MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
_NORMS = ("norm_before_fc", "fc_norm", "norm_output")  # of EAGLE-3.1


def drafter_config(fields: Fields, kind: str, target: ModelConfig) -> DrafterConfig:
    """Read the shape of an EAGLE head (`kind` eagle, eagle3 or p-eagle), and check that it fits its target."""
    layer = fields.mapping("transformer_layer_config") if fields.get("speculators_model_type") else fields
    fields = fields.filled(fields.mapping("eagle_config").given)
    if not fields.flag("use_aux_hidden_state", default=True):
        raise fields.error("use_aux_hidden_state", "true")
    model = model_config(_inherit(layer, target))
    model = model.with_windows(windows_of(layer, model.num_layers))
    norms = {name: fields.flag(name) for name in _NORMS}
    config: DrafterConfig
    if kind in ("eagle3", "p-eagle"):
        config = replace(_eagle3(fields, model, target, kind), **norms)
    elif any(norms.values()):
        raise fields.error(next(filter(norms.get, norms)), "false, except in an EAGLE-3 or P-EAGLE head")
    else:
        config = EagleConfig(model, draft_vocab_size=model.vocab_size, target_hidden_size=model.hidden_size)
    _check_fit(config, target, fields.file)
    return config


def _inherit(layer: Fields, target: ModelConfig) -> Fields:
    """Complete a head's fields with its target's, as a Llama layer.

    RoPE is not the target's: published heads that do not name it were trained with the default base of 10000.
    """
    layer.choice("model_type", ("llama",), default="llama")
    values = {"model_type": "llama", "num_hidden_layers": 1, **target_sizes(layer, target), **layer.given}
    return Fields(layer.file, values, layer.read_names)


def windows_of(layer: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Read the window of each layer of a drafter, which only `layer_types` switches on."""
    layer_types = layer.get("layer_types", [])
    sliding = "sliding_attention"
    if not isinstance(layer_types, list) or any(each not in (sliding, "full_attention") for each in layer_types):
        raise layer.error("layer_types", f"a list of {sliding} or full_attention")
    if sliding not in layer_types:
        return (None,) * num_layers
    if len(layer_types) != num_layers:
        raise layer.error("layer_types", f"{num_layers} times {sliding} or full_attention")
    window = layer.integer("sliding_window")
    return tuple(window if each == sliding else None for each in layer_types)


def _eagle3(fields: Fields, model: ModelConfig, target: ModelConfig, kind: str) -> Eagle3Config:
    if kind == "eagle3":
        require(model.num_layers == 1, f"num_hidden_layers in {fields.file}", model.num_layers, "1 in an EAGLE-3 head")
    if fields.get("speculators_model_type") and fields.get("norm_before_residual") is None:
        raise fields.error("norm_before_residual", "true or false, as readers of the format differ in its default")
    values: dict[str, Any] = {
        "model": model,
        "draft_vocab_size": fields.integer("draft_vocab_size", default=model.vocab_size),
        "target_hidden_size": fields.integer("target_hidden_size", default=model.hidden_size),
        "feature_layers": _feature_layers(fields, target.num_layers),
        "norm_before_residual": fields.flag("norm_before_residual"),
    }
    if kind == "p-eagle":
        return PEagleConfig(**values, mask_token_id=_mask_token_id(fields, model))
    return Eagle3Config(**values)


def _mask_token_id(fields: Fields, model: ModelConfig) -> int:
    """Read the token of a P-EAGLE head's mask rows, under one of the names that vllm-project/vllm reads."""
    ids = {name: fields.integer(name, least=0) for name in _MASK_TOKENS if fields.get(name) is not None}
    name = next(iter(ids), _MASK_TOKENS[0])
    allowed = f"the id of the mask token, 0 to {model.vocab_size - 1}, in {' or '.join(_MASK_TOKENS)}"
    if not ids or len({*ids.values()}) > 1 or ids[name] >= model.vocab_size:
        raise fields.error(name, allowed)
    return ids[name]


def _feature_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """Read the target layers whose inputs are an EAGLE-3 head's features."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids = fields.get(name)
    if ids is None:
        layers = (2, num_layers // 2, num_layers - 3)
        allowed = f"ids of layers; the published default 2, n//2, n-3 is {layers} for a target of {num_layers} layers"
    else:
        if not isinstance(ids, list) or any(type(layer) is not int for layer in ids):
            raise fields.error(name, "a list of integers")
        layers = tuple(layer + _offset(fields) for layer in ids)
        allowed = f"ascending ids for inputs of layers 0 to {num_layers - 1} of the target, at least one"
    ascending = all(a < b for a, b in pairwise(layers))
    if not layers or not ascending or layers[0] < 0 or layers[-1] >= num_layers:
        raise fields.error(name, allowed)
    if fields.integer("num_aux_hidden_states", default=len(layers)) != len(layers):
        raise fields.error("num_aux_hidden_states", f"{len(layers)}, the number of ids in {name}")
    return layers


def _offset(fields: Fields) -> int:
    """Return 1 where ids name a layer's output, the next layer's input, and 0 where they name its input.

    Both conventions are in use, so neither is assumed.
    """
    name = "eagle_aux_hidden_state_convention"
    if fields.get(name) not in ("entering", "output"):
        raise fields.error(name, "entering (id i: the input of layer i) or output (id i: the output of layer i)")
    return int(fields.get(name) == "output")


def _check_fit(config: DrafterConfig, target: ModelConfig, file: Path) -> None:
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
