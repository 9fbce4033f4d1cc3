"""Test models of drafters on frozen KV."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specsim.core.frozen_kv import FrozenKVConfig
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.llama_layer import dense_layer
from specsim.models.synthetic.drafter import SyntheticDrafter, Tensors
from specsim.models.synthetic.weights import copy_embedding, random_weights, widened, widened_head
from specsim.models.synthetic.wide_weights import CONTEXT, HEAD, SOFT, copy, look_for, random_tensors


def _config(target: ModelConfig, _: Mapping[str, Any]) -> FrozenKVConfig:
    """Make the shape of two layers with the target's attention and dense MLPs."""
    width = target.hidden_size
    layers = tuple(replace(layer, mlp=dense_layer(layer, width).mlp) for layer in target.layers[-2:])
    return FrozenKVConfig(widened(replace(target, layers=layers)), target.vocab_size, width)


def _weights(config: FrozenKVConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make a drafter whose first projection copies the embedding, which the target's head reads."""
    tensors = random_weights(drafter_layout(config).required, noise, generator)
    copy_embedding(tensors["pre_projection.weight"])
    tensors["lm_head.weight"] = widened_head(config, target)
    return tensors


def _wide(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, fields: Mapping[str, Any]
) -> DrafterCheckpoint:
    """Make a drafter whose first heads find the last two tokens in the KV of the target's last layer.

    They are those before the root, so later drafts of a path read a context that is not theirs.
    """
    config = FrozenKVConfig(model, model.vocab_size, model.hidden_size)
    tensors = random_tensors(drafter_layout(config).required, generator)
    both = torch.arange(SOFT.start)
    tensors["pre_projection.weight"][both, both] = 1.0
    tensors["lm_head.weight"] = target.tensors["lm_head.weight"]
    tensors["norm.weight"] *= 1.3
    prefix = "layers.0.self_attn."
    distance = int(fields.get("position") == "next")  # of the drafts' position from the last token in the KV
    for head_index in (0, 1):
        look_for(tensors, prefix, head_index, distance + head_index, model)
        copy(tensors, prefix, head_index, None, CONTEXT.start + HEAD * head_index, model)
    return DrafterCheckpoint(config, tensors)


SYNTHETIC = SyntheticDrafter(_config, _weights, _wide)
