"""Test models of P-EAGLE heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specsim.core.eagle import PEagleConfig
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.llama_layer import dense_layer
from specsim.models.synthetic import eagle3
from specsim.models.synthetic.drafter import SyntheticDrafter
from specsim.models.synthetic.weights import HIDDEN, VOCAB, blank


def _config(target: ModelConfig, _: Mapping[str, Any]) -> PEagleConfig:
    """Make the shape of an EAGLE-3 head of two layers, whose mask token is the last one."""
    model = replace(target, layers=2 * (dense_layer(target.layers[-1], target.hidden_size),))
    sizes = target.vocab_size * 7 // 8, target.hidden_size
    features = tuple(range(target.num_layers))[-3:]
    return PEagleConfig(model, *sizes, features, mask_token_id=target.vocab_size - 1)


def _wide(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, _: Mapping[str, Any]
) -> DrafterCheckpoint:
    model = replace(model, layers=2 * model.layers)
    features = tuple(range(target.config.num_layers))[-3:]
    sizes = model.vocab_size * 7 // 8, model.hidden_size
    config = PEagleConfig(model, *sizes, features, norm_before_residual=True)
    return eagle3.wide_weights(config, target, generator)


def _small(model: ModelConfig, draft_VV: torch.Tensor) -> DrafterCheckpoint:
    """Make a head that reads the token before the last one, and in mask rows one fixed token."""
    config = PEagleConfig(model, VOCAB, HIDDEN, (0,), mask_token_id=VOCAB - 1)
    layout = drafter_layout(config)
    tensors = blank({**layout.required, "lm_head.weight": layout.optional["lm_head.weight"]})
    token = torch.arange(VOCAB)
    tensors["fc.weight"][token, token] = 1.0
    tensors["mask_hidden"][VOCAB // 2] = 1.0
    tensors["lm_head.weight"][:, :VOCAB] = draft_VV / HIDDEN**0.5
    return DrafterCheckpoint(config, tensors)


SYNTHETIC = SyntheticDrafter(_config, eagle3.weights, _wide, _small)
