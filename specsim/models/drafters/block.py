"""Block drafters, under the names of DFlash (z-lab/dflash), DSpark (deepseek-ai/DeepSpec) and speculators.

Tensors of the three are named alike. Layer ids are outputs in the first two, where id i is the input of layer i+1, and
inputs in speculators (vllm-project/speculators#737). Without `sample_from_anchor`, rows of z-lab's blocks draft their
own token, and rows of DeepSpec's the next one. config.json is flat in DeepSpec, flat with `dflash_config` in z-lab (and
in SpecForge and JetSpec, which follow it), and has the layers' fields in `transformer_layer_config` in speculators.

Tensors: fc [H, features · target H], hidden_norm, layers.i.*, norm; markov_head.markov_w1 [V, rank] and markov_w2
[draft vocabulary, rank]; confidence_head.proj; embed_tokens, lm_head, d2t where it has its own.
"""

from collections.abc import Collection
from functools import partial
from itertools import pairwise
from typing import Any, Literal

from specsim.core.block import BlockConfig, BlockDrafterConfig, DFlashConfig, DSparkConfig
from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import (
    DrafterFormat,
    DrafterLayout,
    HeadWriter,
    Matches,
    speculators_fields,
)
from specsim.models.checkpoint.drafter_layers import layer_fields, windows_of
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import Layout, layer_layout, norm_layout
from specsim.models.checkpoint.model_config import model_config, target_sizes
from specsim.models.checkpoint.vocabulary import with_vocabulary
from specsim.models.checkpoint.weights import Stored, by_name, check_layout
from specsim.models.drafters.causal_layers import EVERY_LAYER, causal_fields, check_windows, read_causal_layers

# Fields of dflash_config. confidence_head_alpha weighs a loss of the training.
_NESTED = (
    *("target_layer_ids", "num_target_layers", "mask_token_id", "block_size", "attention_mode", "projector_type"),
    *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    *("confidence_head_alpha", *EVERY_LAYER),
)
_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
_OTHER_HEADS = {"attention_mode": "gqa", "markov_head_type": "vanilla"}  # value of the head that we have
# Of the layouts z-lab and deepspec, and of speculators.
_CLASSES = {"dflash": ("DFlashDraftModel", "DFlashDraftModel"), "dspark": ("Qwen3DSparkModel", "DSparkDraftModel")}


def _has_markov_rank(fields: Fields, names: Collection[str], is_wanted: bool) -> bool:
    nested = fields.mapping("dflash_config")
    return any(part.get("markov_rank") is not None for part in (fields, nested)) or _is_specforge_dspark(nested)


def _is_specforge_dspark(fields: Fields) -> bool:
    return fields.get("projector_type") == "dspark"


def _has_dflash_config(fields: Fields, names: Collection[str], is_wanted: bool) -> bool:
    return bool(fields.get("dflash_config"))


def _layout(config: BlockDrafterConfig) -> DrafterLayout:
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
        layout |= norm_layout(name, width, "input_layernorm", "post_attention_layernorm")
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


def _load(
    config_class: type[BlockDrafterConfig], fields: Fields, stored: list[Stored], target: ModelConfig
) -> DrafterCheckpoint:
    folder = fields.file.parent
    named = by_name(stored, lambda key: key.removeprefix("model."))
    config = _config(config_class, fields, target)
    tensors = check_layout(named, folder, *_layout(config))
    return DrafterCheckpoint(config, with_vocabulary(tensors, folder, target.vocab_size))


def _config(config_class: type[BlockDrafterConfig], fields: Fields, target: ModelConfig) -> BlockDrafterConfig:
    is_of_speculators = bool(fields.get("speculators_model_type"))
    layer = fields.mapping("transformer_layer_config") if is_of_speculators else fields
    nested = fields.mapping("dflash_config")
    for name in nested.non_null:
        allowed = f"a field of DFlash: {', '.join(_NESTED)}"
        require(name in _NESTED, f"dflash_config in {fields.file}", name, allowed)
    fields = fields.filled(nested.non_null)
    for name, value in {**_OTHER_HEADS, "projector_type": config_class.kind}.items():
        fields.choice(name, (value,), default=value)
    model = _model(layer, target)
    config = config_class(
        model=model,
        draft_vocab_size=fields.integer("draft_vocab_size", default=model.vocab_size),
        target_hidden_size=fields.integer("target_hidden_size", default=target.hidden_size),
        feature_layers=_feature_layers(fields, target.num_layers, model.num_layers, is_of_speculators),
        block=_block(fields, config_class.kind, target, is_of_speculators),
        causal_layers=read_causal_layers(fields, model, is_of_speculators),
    )
    check_windows(config, layer)
    sizes = {"vocab_size": model.vocab_size, "target_hidden_size": config.target_hidden_size}
    for name, value in sizes.items():
        wanted = getattr(target, name.removeprefix("target_"))
        require(value == wanted, f"{name} in {fields.file}", value, f"{wanted}, the target's")
    return config


def _model(layer: Fields, target: ModelConfig) -> ModelConfig:
    """Read the layers, those of Qwen3 unless config.json names Llama's."""
    layer.choice("model_type", ("qwen3", "llama"), default="qwen3")
    values: dict[str, Any] = {"model_type": "qwen3", "num_hidden_layers": 1, **target_sizes(layer, target)}
    values |= {name: value for name, value in layer.non_null.items() if name not in _WINDOWS}
    model = model_config(Fields(layer.file, values, layer.read_names))
    return model.with_windows(windows_of(layer, model))


def _feature_layers(fields: Fields, num_layers: int, count: int, are_inputs: bool) -> tuple[int, ...]:
    """Read the target layers whose inputs are the features; the last layer's output, which is normed, is none.

    count: of outputs without ids, spread from 1 to n-4 as z-lab's first code, JetSpec and SGLang choose them.
    """
    name = "aux_hidden_state_layer_ids" if are_inputs else "target_layer_ids"
    ids = fields.get(name)
    if ids is None and not are_inputs and fields.integer("num_target_layers", default=num_layers) == num_layers:
        step = (num_layers - 4) / max(1, count - 1)
        ids = [round(1 + index * step) for index in range(count)] if count > 1 else [num_layers // 2]
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
    if kind == "dspark" and fields.get("num_anchors") is None and not _is_specforge_dspark(fields):
        raise InputError(f"{name} in {fields.file}", "missing", "true or false, or the fields of DeepSpec's config")
    return "next" if kind == "dspark" else "own"


def _config_json(config: BlockDrafterConfig, layout: str) -> dict[str, Any]:
    """Make the config.json of a block drafter.

    Which token a row drafts is written even where a layout has a default for it, as tensors do not tell.
    """
    block = config.block
    layer = layer_fields(config.model)
    fields: dict[str, Any] = {
        "block_size": block.size,
        "sample_from_anchor": block.predicts == "next",
        "target_hidden_size": config.target_hidden_size,
        **_heads(config),
        **causal_fields(config, layout),
    }
    if layout == "speculators":
        fields |= {"aux_hidden_state_layer_ids": list(config.feature_layers), "mask_token_id": block.mask_token}
        fields["draft_vocab_size"] = config.draft_vocab_size
        num_drafts = block.size - (block.predicts == "own")
        return speculators_fields(config.kind, _CLASSES[config.kind][1], num_drafts, fields, layer)
    if config.draft_vocab_size != config.model.vocab_size:
        raise InputError("layout", layout, "speculators for a drafter with a vocabulary of its own")
    ids = {"target_layer_ids": [layer - 1 for layer in config.feature_layers], "mask_token_id": block.mask_token}
    ids = {"dflash_config": ids} if layout == "z-lab" else ids
    return {"architectures": [_CLASSES[config.kind][0]]} | layer | fields | ids


def _heads(config: BlockDrafterConfig) -> dict[str, Any]:
    """List the fields of DSpark's heads."""
    block = config.block
    if config.kind == "dflash":
        return {}
    fields: dict[str, Any] = {
        "markov_rank": block.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": block.confidence != "none",
        "confidence_head_with_markov": block.confidence == "hidden_and_token",
    }
    return fields | ({"confidence_threshold": block.threshold} if block.threshold else {})


def _format(config_class: type[BlockDrafterConfig], precedence: int, matches: Matches, layout: str) -> DrafterFormat:
    return DrafterFormat(
        precedence=precedence,
        matches=matches,
        load=partial(_load, config_class),
        layout=_layout,
        speculators=config_class.kind,
        writer=HeadWriter((layout, "speculators"), _config_json),
        draft_rows=("lm_head.weight", "markov_head.markov_w2.weight"),
    )


DSPARK = _format(DSparkConfig, 0, _has_markov_rank, "deepspec")
DFLASH = _format(DFlashConfig, 1, _has_dflash_config, "z-lab")
