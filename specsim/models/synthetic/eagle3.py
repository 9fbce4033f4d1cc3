"""Test models of EAGLE-3 heads, with and without the norms of EAGLE-3.1."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specsim.core.eagle import Eagle3Config
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.llama_layer import dense_layer
from specsim.models.synthetic.drafter import SyntheticDrafter, Tensors
from specsim.models.synthetic.weights import hand_on_values, match_constant, random_weights, scale_features
from specsim.models.synthetic.wide_weights import CONTEXT, HEAD, copy, find, random_tensors


def _config(target: ModelConfig, fields: Mapping[str, Any]) -> Eagle3Config:
    """Make the shape of a head for seven eighths of the vocabulary.

    With fc_norm it has two layers, and reads what enters each of the target's and the final norm.
    """
    is_deep = fields.get("fc_norm")
    layers = tuple(dense_layer(layer, target.hidden_size) for layer in target.layers[-2 if is_deep else -1 :])
    model = replace(target, layers=layers)
    entered = tuple(range(target.num_layers + 1))
    features = entered if is_deep else entered[:-1][-3:]
    return Eagle3Config(model, target.vocab_size * 7 // 8, target.hidden_size, features)


def weights(config: Eagle3Config, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make a head whose attention to the row itself replaces the residual by the new token's embedding."""
    model = config.model
    tensors = random_weights(drafter_layout(config).required, noise, generator)
    scale_features(tensors, "fc.weight", noise)
    _draft_fewer_tokens(tensors, config, target)
    prefix = "midlayer.self_attn."
    match_constant(tensors, prefix, model)
    # The value is the embedding minus the hidden state, which the residual adds back.
    identity = torch.eye(model.hidden_size, dtype=torch.float64)
    hand_on_values(tensors, prefix, model, torch.cat([identity, -identity], dim=1))
    return tensors


def wide_weights(config: Eagle3Config, target: TargetCheckpoint, generator: torch.Generator) -> DrafterCheckpoint:
    """Make a head in whose residual two heads replace the hidden state's code by the new token's.

    Norms of EAGLE-3.1 leave code and context as they are, up to a factor that the next norm takes out.
    """
    model = config.model
    hidden = model.hidden_size
    tensors = random_tensors(drafter_layout(config).required, generator)
    _draft_fewer_tokens(tensors, config, target)
    prefix = "midlayer.self_attn."
    value = tensors[f"{prefix}v_proj.weight"]
    for part in (0, 1):
        find(tensors, prefix, 2 * part, 0, model)
        copy(tensors, prefix, 2 * part, HEAD * part, HEAD * part, model)
        entries = HEAD * part + torch.arange(HEAD)
        value[entries, hidden + entries] = -1.0
    find(tensors, prefix, 4, 1, model)
    copy(tensors, prefix, 4, 0, CONTEXT.start, model)
    find(tensors, prefix, 6, 0, model)
    copy(tensors, prefix, 6, hidden + CONTEXT.start, CONTEXT.start, model, -1.0)
    return DrafterCheckpoint(config, tensors)


def _draft_fewer_tokens(tensors: Tensors, config: Eagle3Config, target: TargetCheckpoint) -> None:
    """Give a head the rows of the target's head for its own tokens, which are spread over the vocabulary."""
    vocab_size = config.model.vocab_size
    chosen = torch.linspace(0, vocab_size - 1, config.draft_vocab_size).long()
    tensors["lm_head.weight"] = target.tensors["lm_head.weight"][chosen]
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True)


def _wide(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, fields: Mapping[str, Any]
) -> DrafterCheckpoint:
    features = tuple(range(target.config.num_layers))[-3:]
    config = Eagle3Config(model, model.vocab_size * 7 // 8, model.hidden_size, features, norm_before_residual=True)
    return wide_weights(replace(config, **fields), target, generator)


SYNTHETIC = SyntheticDrafter(_config, weights, _wide)
