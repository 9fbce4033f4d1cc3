"""Test models of language models as drafters."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.synthetic.drafter import SyntheticDrafter, Tensors
from specsim.models.synthetic.weights import HIDDEN, VOCAB, blank, random_weights, widened, widened_head
from specsim.models.synthetic.wide_weights import language_model


def _config(target: ModelConfig, _: Mapping[str, Any]) -> StandaloneConfig:
    model = widened(replace(target, layers=target.layers[-1:]))
    return StandaloneConfig(model, target.vocab_size, target.hidden_size)


def _weights(config: StandaloneConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make a model with the target's embedding and head, and layers of its own."""
    tensors = random_weights(drafter_layout(config).required, noise, generator)
    embedding = target.tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, embedding], 1)[:, : config.model.hidden_size]
    tensors["lm_head.weight"] = widened_head(config, target)
    return tensors


def _wide(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, _: Mapping[str, Any]
) -> DrafterCheckpoint:
    """Make a language model of one layer."""
    config = StandaloneConfig(model, model.vocab_size, model.hidden_size)
    return DrafterCheckpoint(config, language_model(model, generator))


def _small(model: ModelConfig, draft_VV: torch.Tensor) -> DrafterCheckpoint:
    """Make a model whose head reads the last token's embedding; its layer adds nothing."""
    config = StandaloneConfig(model, VOCAB, HIDDEN)
    tensors = blank(drafter_layout(config).required)
    token = torch.arange(VOCAB)
    tensors["model.embed_tokens.weight"][token, token] = 1.0
    tensors["lm_head.weight"][:, :VOCAB] = draft_VV / HIDDEN**0.5
    return DrafterCheckpoint(config, tensors)


SYNTHETIC = SyntheticDrafter(_config, _weights, _wide, _small)
