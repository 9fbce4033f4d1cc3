"""Test models of MTP modules."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specsim.core.mtp import MtpConfig
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.synthetic.drafter import SyntheticDrafter, Tensors
from specsim.models.synthetic.weights import DRAFT, HIDDEN, VOCAB, blank, copy_embedding, random_weights
from specsim.models.synthetic.wide_weights import SHARE, SOFT, random_tensors, read_two_before

_MODULES = 3


def _shape(model: ModelConfig, modules: int = _MODULES) -> MtpConfig:
    layers = modules * model.layers[-1:]
    return MtpConfig(replace(model, layers=layers), model.vocab_size, model.hidden_size, num_modules=modules)


def _config(target: ModelConfig, _: Mapping[str, Any]) -> MtpConfig:
    return _shape(target)


def _weights(config: MtpConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make modules that copy the embedding, each with noise of its own, and have the target's final norm."""
    tensors = random_weights(drafter_layout(config).required, noise, generator)
    for index in range(config.num_modules):
        copy_embedding(tensors[f"modules.{index}.eh_proj.weight"])
        tensors[f"modules.{index}.norm.weight"] *= target.tensors["model.norm.weight"]
    return tensors


def _wide(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, _: Mapping[str, Any]
) -> DrafterCheckpoint:
    """Make modules that find the tokens before in their own rows, and read the hidden state in SOFT only."""
    config = _shape(model)
    tensors = random_tensors(drafter_layout(config).required, generator)
    both = torch.arange(SOFT.start)
    for module in range(_MODULES):
        tensors[f"modules.{module}.eh_proj.weight"][both, both] = SHARE
        tensors[f"modules.{module}.norm.weight"] *= 1.3
        read_two_before(tensors, f"modules.{module}.self_attn.", model)
    return DrafterCheckpoint(config, tensors)


def _small(model: ModelConfig, _: torch.Tensor) -> DrafterCheckpoint:
    """Make modules that pass on the last token as the EAGLE head does."""
    config = _shape(model, 2)
    tensors = blank(drafter_layout(config).required)
    token = torch.arange(VOCAB)
    for index in range(config.num_modules):
        tensors[f"modules.{index}.eh_proj.weight"][DRAFT + token, token] = 1.0
        tensors[f"modules.{index}.norm.weight"] *= HIDDEN**-0.5
    return DrafterCheckpoint(config, tensors)


SYNTHETIC = SyntheticDrafter(_config, _weights, _wide, _small)
