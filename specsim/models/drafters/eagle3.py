"""EAGLE-3 heads, in the layout of the EAGLE repository (and SGLang's fields) or of speculators.

Tensors: fc [H, features · target H], midlayer.*, norm, lm_head [draft vocabulary, H]; input_norm and fc_norm.i as the
flags of EAGLE-3.1 say; d2t and t2d, both or neither; embed_tokens where it has its own. Sources: SafeAILab/EAGLE
(`midlayer`, a flat config.json); vllm-project/speculators (`layers.0`, the layer's fields in
`transformer_layer_config`).
"""

import re
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from specsim.core.eagle import Eagle3Config
from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import DrafterFormat, DrafterLayout, HeadWriter, speculators_fields
from specsim.models.checkpoint.drafter_layers import layer_fields
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import Layout, layer_layout, norm_layout
from specsim.models.checkpoint.vocabulary import with_vocabulary
from specsim.models.checkpoint.weights import Stored, by_name, check_layout
from specsim.models.drafters.eagle import HeadFields, check_fit, read_head

LAYOUTS = ("eagle", "speculators")
NUM_STEPS = 3  # of a round in an engine that takes them from the head
_KEYS = r"midlayer\.|layers\.0\.hidden_norm\.|d2t$"  # none of them is in an EAGLE-1/2 head


def _matches(fields: Fields, names: Collection[str], is_wanted: bool) -> bool:
    if fields.get("draft_vocab_size"):
        return True
    return "fc.weight" in names and any(re.match(_KEYS, name) for name in names)


def eagle3_layout(config: Eagle3Config) -> DrafterLayout:
    """List the tensors: fc of target features, layers, a head, and the norms of EAGLE-3.1 before fc.

    The first layer's attention reads embedding and feature together. A head of its target's width and vocabulary may
    read out by its target's lm_head, as in vllm-project/vllm and SGLang.
    """
    model = config.model
    width = model.hidden_size
    draft_vocab_size = config.draft_vocab_size
    num_features = len(config.feature_layers)
    fused = num_features * config.target_hidden_size
    is_other_width = width != config.target_hidden_size
    has_vocabulary = draft_vocab_size != model.vocab_size
    head: Layout = {"lm_head.weight": (draft_vocab_size, width)}
    layout: Layout = {"fc.weight": (width, fused), "norm.weight": (width,)}
    layout |= head if is_other_width or has_vocabulary else {}
    if config.norm_before_fc:
        layout["input_norm.weight"] = (fused,)
    if config.fc_norm:
        layout |= {f"fc_norm.{index}.weight": (config.target_hidden_size,) for index in range(num_features)}
    layout |= norm_layout("midlayer", width, "hidden_norm", "input_layernorm", "post_attention_layernorm")
    layout |= layer_layout("midlayer", model.layers[0], width, 2 * width)
    for index in range(1, model.num_layers):  # where there are several
        layout |= norm_layout(f"layers.{index}", width, "input_layernorm", "post_attention_layernorm")
        layout |= layer_layout(f"layers.{index}", model.layers[index], width, width)
    embedding: Layout = {"embed_tokens.weight": (model.vocab_size, width)}
    d2t: Layout = {"d2t": (draft_vocab_size,)}
    t2d: Layout = {"t2d": (model.vocab_size,)}
    layout |= embedding if is_other_width else {}
    layout |= d2t if has_vocabulary else {}
    return DrafterLayout(layout, embedding | head | d2t | t2d)


def read_config(fields: Fields, target: ModelConfig) -> Eagle3Config:
    """Read the shape of a head, and check that it fits its target."""
    head = read_head(fields, target)
    config = Eagle3Config(**config_values(head, target))
    check_fit(config, target, fields.file)
    return config


def config_values(head: HeadFields, target: ModelConfig) -> dict[str, Any]:
    """Read the values of an Eagle3Config."""
    fields = head.fields
    model = head.model
    if fields.get("speculators_model_type") and fields.get("norm_before_residual") is None:
        raise fields.error("norm_before_residual", "true or false, as readers of the format differ in its default")
    return {
        "model": model,
        "draft_vocab_size": fields.integer("draft_vocab_size", default=model.vocab_size),
        "target_hidden_size": fields.integer("target_hidden_size", default=model.hidden_size),
        "feature_layers": _feature_layers(fields, target.num_layers),
        "norm_before_residual": fields.flag("norm_before_residual"),
        **head.norms,
    }


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
        allowed = (
            f"ascending ids, at least one, for inputs of layers 0 to {num_layers} ({num_layers}: of the final norm)"
        )
        if not all(a < b for a, b in pairwise(ids)):
            raise fields.error(name, allowed)
        # The number of layers can only be an input, as no layer's output has that id.
        layers = tuple(layer + (0 if ids[-1] == num_layers else _offset(fields)) for layer in ids)
    ascending = all(a < b for a, b in pairwise(layers))
    last = num_layers if ids and ids[-1] == num_layers else num_layers - 1
    if not layers or not ascending or layers[0] < 0 or layers[-1] > last:
        raise fields.error(name, allowed)
    if fields.integer("num_aux_hidden_states", default=len(layers)) != len(layers):
        raise fields.error("num_aux_hidden_states", f"{len(layers)}, the number of ids in {name}")
    return layers


def _offset(fields: Fields) -> int:
    """Return 1 where ids name a layer's output, the next layer's input, and 0 where they name its input.

    Ids of the speculators layout are inputs in its own code and in vLLM. Other files do not tell.
    """
    name = "eagle_aux_hidden_state_convention"
    default = "entering" if fields.get("speculators_model_type") else None
    allowed = (
        "output (id i is layer i's output, as SpecForge and Model-Optimizer train and SGLang reads) or entering (its "
        "input, as vLLM reads)"
    )
    if fields.get(name, default) not in ("entering", "output"):
        raise fields.error(name, allowed)
    return int(fields.get(name) == "output")


def load_tensors(
    config: Eagle3Config, layout: DrafterLayout, stored: Iterable[Stored], folder: Path
) -> DrafterCheckpoint:
    """Check the tensors of a head and the tables of its vocabulary."""
    tensors = check_layout(by_name(stored, _canonical), folder, *layout)
    if config.model.tie_word_embeddings and "lm_head.weight" not in tensors:
        raise InputError(f"lm_head.weight in {folder}", "missing", "a tensor, where tie_word_embeddings is true")
    if "t2d" in tensors and "d2t" not in tensors:
        raise InputError(f"d2t in {folder}", "missing", "a table of offsets, as there is a t2d")
    return DrafterCheckpoint(config, with_vocabulary(tensors, folder, config.model.vocab_size))


def _load(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    config = read_config(fields, target)
    return load_tensors(config, eagle3_layout(config), stored, fields.file.parent)


def _canonical(key: str) -> str:
    name = key.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def head_fields(config: Eagle3Config) -> dict[str, Any]:
    """List the fields that only heads have.

    Feature layers are given as entered, with the name of this convention, which both layouts leave open.
    """
    fields: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "eagle_aux_hidden_state_convention": "entering",
    }
    return fields | {name: True for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)}


def arranged(
    fields: dict[str, Any], model: ModelConfig, layout: str, model_type: str, class_name: str
) -> dict[str, Any]:
    """Add the fields of the layers as a layout does. model_type, class_name: of speculators."""
    families = ("llama", "qwen3") if layout == "speculators" else ("llama",)
    allowed = f"one for layers of {model.family}: readers of {layout} have those of {' and '.join(families)}"
    require(model.family in families, "layout", layout, allowed)
    layer = layer_fields(model)
    if layout == "speculators":
        return speculators_fields(model_type, class_name, NUM_STEPS, fields, layer)
    return {"architectures": ["LlamaForCausalLMEagle3"]} | layer | fields


def first_layer(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename the first layer's tensors as speculators does."""
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def _config_json(config: Eagle3Config, layout: str) -> dict[str, Any]:
    return arranged(head_fields(config), config.model, layout, "eagle3", "Eagle3DraftModel")


def _tensors(tensors: Mapping[str, torch.Tensor], layout: str) -> Mapping[str, torch.Tensor]:
    return first_layer(tensors) if layout == "speculators" else tensors


FORMAT = DrafterFormat(
    precedence=4,
    matches=_matches,
    load=_load,
    layout=eagle3_layout,
    speculators="eagle3",
    writer=HeadWriter(LAYOUTS, _config_json, _tensors),
)
