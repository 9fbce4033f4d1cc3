"""Small test models of one kind of drafter, which its record names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.kinds import DrafterKind
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.core.token_drafter import LookupConfig, SuffixConfig
from specsim.core.verifiers import resolve

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SyntheticDrafter:
    """Shapes and weights of a kind's test models, which draw every random number from a generator.

    config: shape for a target, before `fields` replace some of its fields.
    weights: those of `synthetic_pair`, for a config, a target and a scale of noise.
    wide: checkpoint of `wide_pair`, for layers, a target and a generator, before `fields` replace some of its fields.
    small: checkpoint of the small-vocabulary model, for layers and the logits of drafts f64 [V, V]; None without one.
    """

    config: Callable[[ModelConfig, Mapping[str, Any]], DrafterConfig]
    weights: Callable[[Any, TargetCheckpoint, float, torch.Generator], Tensors]
    wide: Callable[[ModelConfig, TargetCheckpoint, torch.Generator, Mapping[str, Any]], DrafterCheckpoint]
    small: Callable[[ModelConfig, torch.Tensor], DrafterCheckpoint] | None = None


@dataclass(frozen=True, slots=True)
class SyntheticLookup:
    """Settings of a drafter without weights."""

    solo: LookupConfig  # drafts of a request do not depend on other requests
    small: LookupConfig  # for the small-vocabulary model


def lookup_of(kind: DrafterKind) -> SyntheticLookup:
    """Find the settings of a kind without weights: its class's defaults, unless the record has others."""
    if kind.synthetic:
        return resolve(kind.synthetic)
    config = resolve(kind.settings)()
    return SyntheticLookup(config, config)


SUFFIX = SyntheticLookup(SuffixConfig(shared=False), SuffixConfig(offset=2.0))
