"""Test models of EAGLE heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specsim.core.eagle import EagleConfig
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.llama_layer import dense_layer
from specsim.models.synthetic.drafter import SyntheticDrafter, Tensors
from specsim.models.synthetic.weights import DRAFT, HIDDEN, VOCAB, blank, copy_embedding, random_weights
from specsim.models.synthetic.wide_weights import SOFT, random_tensors, read_two_before


def _config(target: ModelConfig, _: Mapping[str, Any]) -> EagleConfig:
    layers = (dense_layer(target.layers[-1], target.hidden_size, with_latent=True),)
    return EagleConfig(replace(target, layers=layers), target.vocab_size, target.hidden_size)


def _weights(config: EagleConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make a head whose fc copies the embedding."""
    required, optional = drafter_layout(config)
    tensors = random_weights(required | optional, noise, generator)
    tensors["embed_tokens.weight"] = target.tensors["model.embed_tokens.weight"]
    copy_embedding(tensors["fc.weight"])
    return tensors


def _wide(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, _: Mapping[str, Any]
) -> DrafterCheckpoint:
    config = EagleConfig(model, model.vocab_size, model.hidden_size)
    tensors = random_tensors(drafter_layout(config).required, generator)
    tensors["embed_tokens.weight"] = target.tensors["model.embed_tokens.weight"]
    both = torch.arange(SOFT.start)
    tensors["fc.weight"][both, both] = 1.0
    read_two_before(tensors, "layers.0.self_attn.", model)
    return DrafterCheckpoint(config, tensors)


def _small(model: ModelConfig, _: torch.Tensor) -> DrafterCheckpoint:
    """Make an fc that passes on the embedding into features where the target has 0; attention adds nothing."""
    config = EagleConfig(model, VOCAB, HIDDEN)
    tensors = blank(drafter_layout(config).required)
    token = torch.arange(VOCAB)
    tensors["embed_tokens.weight"][token, DRAFT + token] = 1.0
    tensors["fc.weight"][:, :HIDDEN] = torch.eye(HIDDEN, dtype=torch.float64)
    return DrafterCheckpoint(config, tensors)


SYNTHETIC = SyntheticDrafter(_config, _weights, _wide, _small)
