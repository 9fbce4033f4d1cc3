"""Block drafters, under the names of DFlash (z-lab/dflash), DSpark (deepseek-ai/DeepSpec) and speculators.

Tensors of the three are named alike. Layer ids are outputs in the first two, where id i is the input of layer i+1, and
inputs in speculators (vllm-project/speculators#737). Without `sample_from_anchor`, rows of z-lab's blocks draft their
own token, and rows of DeepSpec's the next one.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Literal

from specsim.core.block import BlockConfig, BlockDrafterConfig, DFlashConfig, DSparkConfig
from specsim.core.errors import InputError, require
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_config import windows_of
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.inherited import target_sizes
from specsim.models.checkpoint.model_config import model_config
from specsim.models.checkpoint.weights import Stored, by_name

_NESTED = ("target_layer_ids", "mask_token_id", "block_size")  # fields of dflash_config
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_OTHER_HEADS = {"projector_type": "dflash", "markov_head_type": "vanilla"}  # value of the head that we have


def read_block(
    fields: Fields, kind: str, stored: Iterable[Stored], target: ModelConfig
) -> tuple[BlockDrafterConfig, dict[str, Stored]]:
    """Read the shape of a block drafter (`kind` dflash or dspark), and its tensors under our names."""
    named = by_name(stored, lambda key: key.removeprefix("model."))
    is_of_speculators = bool(fields.get("speculators_model_type"))
    layer = fields.mapping("transformer_layer_config") if is_of_speculators else fields
    nested = fields.mapping("dflash_config")
    for name in nested.given:
        allowed = f"a field of DFlash: {', '.join(_NESTED)}"
        require(name in _NESTED, f"dflash_config in {fields.file}", name, allowed)
    fields = fields.filled(nested.given)
    for name, own in _OTHER_HEADS.items():
        fields.choice(name, (own,), default=own)
    model = _model(layer, target, is_of_speculators, fields)
    make = DFlashConfig if kind == "dflash" else DSparkConfig
    config = make(
        model=model,
        draft_vocab_size=fields.integer("draft_vocab_size", default=model.vocab_size),
        target_hidden_size=fields.integer("target_hidden_size", default=target.hidden_size),
        feature_layers=_feature_layers(fields, target.num_layers, is_of_speculators),
        block=_block(fields, kind, target, is_of_speculators),
    )
    own = {"vocab_size": model.vocab_size, "target_hidden_size": config.target_hidden_size}
    for name, value in own.items():
        wanted = getattr(target, name.removeprefix("target_"))
        require(value == wanted, f"{name} in {fields.file}", value, f"{wanted}, the target's")
    return config, named


def _model(layer: Fields, target: ModelConfig, is_of_speculators: bool, fields: Fields) -> ModelConfig:
    """Read the layers, those of Qwen3 unless config.json names Llama's."""
    layer.choice("model_type", ("qwen3", "llama"), default="qwen3")
    values: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 1, **target_sizes(layer, target)}
    values |= {name: value for name, value in layer.given.items() if name not in _WINDOWS}
    model = model_config(Fields(layer.file, values, layer.read_names))
    windows = windows_of(layer, model.num_layers)
    if is_of_speculators and any(windows) and not fields.flag("sliding_window_non_causal"):
        raise fields.error("sliding_window_non_causal", "true where layers have windows: a block sees all its rows")
    return model.with_windows(windows)


def _feature_layers(fields: Fields, num_layers: int, are_inputs: bool) -> tuple[int, ...]:
    """Read the target layers whose inputs are the features; the last layer's output, which is normed, is none."""
    name = "aux_hidden_state_layer_ids" if are_inputs else "target_layer_ids"
    ids = fields.get(name)
    if not isinstance(ids, list) or not ids or any(type(layer) is not int for layer in ids):
        raise fields.error(name, "a list of integers, at least one, as the drafter was trained with")
    layers = tuple(layer + (0 if are_inputs else 1) for layer in ids)
    ascending = all(a < b for a, b in pairwise(layers))
    if not ascending or layers[0] < 0 or layers[-1] >= num_layers:
        least, most = (0, num_layers - 1) if are_inputs else (-1, num_layers - 2)
        raise fields.error(name, f"ascending ids of {least} to {most} for a target of {num_layers} layers")
    return layers


def _block(fields: Fields, kind: str, target: ModelConfig, is_of_speculators: bool) -> BlockConfig:
    """Read the shape of a block, and the heads of a DSpark drafter."""
    mask_token = fields.integer("mask_token_id", least=0, most=target.vocab_size - 1)
    size = fields.integer("block_size", least=2)
    predicts = _predicts(fields, kind, is_of_speculators)
    if kind == "dflash":
        return BlockConfig(size, mask_token, predicts)
    confidence: Literal["none", "hidden", "hidden_and_token"] = "none"
    if fields.flag("enable_confidence_head"):
        confidence = "hidden_and_token" if fields.flag("confidence_head_with_markov") else "hidden"
    return BlockConfig(
        size,
        mask_token,
        predicts,
        markov_rank=fields.integer("markov_rank", default=0, least=0),
        confidence=confidence,
        threshold=fields.get("confidence_threshold", 0.0),
    )


def _predicts(fields: Fields, kind: str, is_of_speculators: bool) -> Literal["own", "next"]:
    """Read which token a row drafts, which tensors do not tell."""
    name = "sample_from_anchor"
    if fields.get(name) is not None:
        return "next" if fields.flag(name) else "own"
    if kind == "dspark" and is_of_speculators:
        raise fields.error(name, "true or false, as the default of the format has changed")
    if kind == "dspark" and fields.get("num_anchors") is None:
        raise InputError(f"{name} in {fields.file}", "missing", "true or false, or the fields of DeepSpec's config")
    return "next" if kind == "dspark" else "own"
