"""Random weights for a target and an EAGLE head of a real shape, made on the device that uses them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.eagle import Eagle3Config, EagleConfig
from specsim.core.errors import require
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.layout import Layout, drafter_layout, target_layout
from specsim.models.llama_layer import llama_layer
from specsim.models.shapes.model_shape import Shape, shape

DRAFT_VOCAB_SIZE = 32000  # of the published EAGLE-3 heads for Llama 3 and Qwen3
_SCALE = 0.02
# Standard deviation of the logits. With it the best of 32000 drafts has a mean probability of 0.7, as in a trained
# head, and 99 of 100 trees of topk 4, 3 steps and 8 nodes reach their third level; flat logits would not do so.
_LOGIT_SCALE = 10.0
_DRAFTERS = ("eagle3", "eagle", None)
Tensors = dict[str, torch.Tensor]


def random_pair(
    of: str | Path | Shape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    drafter: Literal["eagle3", "eagle"] | None = "eagle3",
    seed: int = 0,
) -> Pair:
    """Make a pair of a shape (or of its name or path) with random weights and without a tokenizer.

    It is for timing, together with core.synthetic_acceptance: its tokens mean nothing and its drafts are almost never
    accepted. Norms are 1, other weights normal. eagle3: one Llama layer of the target's sizes over three features, with
    a vocabulary of 32000 drafts (in a slice its share), or the target's where that is smaller. eagle: the same layer
    over one feature, with the target's head. Raises InputError for another drafter, and for `eagle3` on a target of
    fewer than three layers.
    """
    of = of if isinstance(of, Shape) else shape(of)
    require(drafter in _DRAFTERS, "drafter", drafter, "eagle3 or eagle or None")
    head = _drafter_config(of, drafter) if drafter else None
    generator = torch.Generator(device=device).manual_seed(seed)
    target = TargetCheckpoint(of.config, _target_tensors(of.config, generator, dtype))
    drafting = DrafterCheckpoint(head, _drafter_tensors(head, generator, dtype)) if head else None
    return Pair(target, drafting, None, f"random weights of {of.name}" + (f", {drafter}" if drafter else ""))


def _drafter_config(of: Shape, kind: str) -> DrafterConfig:
    target = of.config
    model = replace(
        target, family="llama", layers=(llama_layer(target.layers[-1], target.hidden_size),), tie_word_embeddings=False
    )
    if kind == "eagle":
        return EagleConfig(model, target.vocab_size, target.hidden_size)
    draft_vocab_size = min(DRAFT_VOCAB_SIZE // of.tensor_parallel, target.vocab_size)
    return Eagle3Config(model, draft_vocab_size, target.hidden_size, _feature_layers(target.num_layers))


def _feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Choose layers 2, n//2, n-3 as published, and first, middle and last layer of fewer than seven."""
    require(num_layers >= 3, "drafter", "eagle3", f"eagle or none for a target of {num_layers} layers: it reads three")
    return (2, num_layers // 2, num_layers - 3) if num_layers >= 7 else (0, num_layers // 2, num_layers - 1)


def _target_tensors(config: ModelConfig, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
    layout = target_layout(config)
    head = layout.pop("lm_head.weight")
    tensors = _random(layout, generator, dtype)
    if config.tie_word_embeddings:
        tensors["model.embed_tokens.weight"].mul_(_head_scale(config) / _SCALE)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    else:
        tensors["lm_head.weight"] = _normal(head, _head_scale(config), generator, dtype)
    return tensors


def _drafter_tensors(config: DrafterConfig, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
    layout, optional = drafter_layout(config)
    if config.kind == "eagle":
        return _random(layout | optional, generator, dtype)
    head = layout.pop("lm_head.weight")
    has_vocabulary = layout.pop("d2t", None) is not None
    tensors = _random(layout, generator, dtype)
    tensors["lm_head.weight"] = _normal(head, _head_scale(config.model), generator, dtype)
    return tensors | (_vocabulary(config, generator.device) if has_vocabulary else {})


def _vocabulary(config: DrafterConfig, device: torch.device) -> Tensors:
    """Spread draft ids evenly over the target's, with d2t as offsets and t2d as the target ids that they reach."""
    draft_ids = torch.arange(config.draft_vocab_size, device=device)
    target_ids = draft_ids * config.model.vocab_size // config.draft_vocab_size
    reached = torch.zeros(config.model.vocab_size, dtype=torch.bool, device=device)
    return {"d2t": target_ids - draft_ids, "t2d": reached.index_fill(0, target_ids, True)}


def _head_scale(config: ModelConfig) -> float:
    """Compute the scale of a head's weights that gives logits of standard deviation _LOGIT_SCALE after a norm."""
    return _LOGIT_SCALE / math.sqrt(config.hidden_size)


def _random(layout: Layout, generator: torch.Generator, dtype: torch.dtype) -> Tensors:
    return {
        name: torch.ones(size, device=generator.device, dtype=dtype)
        if "norm" in name
        else _normal(size, _SCALE, generator, dtype)
        for name, size in layout.items()
    }


def _normal(size: tuple[int, ...], scale: float, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """Draw in place, without a second tensor of this size."""
    return torch.empty(size, device=generator.device, dtype=dtype).normal_(0, scale, generator=generator)
