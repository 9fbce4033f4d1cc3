"""Test models of block drafters, DFlash and DSpark."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specsim.core.block import BlockConfig, BlockDrafterConfig, DFlashConfig, DSparkConfig
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.llama_layer import dense_layer
from specsim.models.synthetic.drafter import SyntheticDrafter, Tensors
from specsim.models.synthetic.weights import (
    HIDDEN,
    VOCAB,
    blank,
    hand_on_values,
    match_constant,
    random_weights,
    scale_features,
)
from specsim.models.synthetic.wide_weights import CODE, CONTEXT, HEAD, PART, SHARE, SOFT, copy, find, random_tensors


def _shape(model: ModelConfig, target: ModelConfig, block: BlockConfig) -> BlockDrafterConfig:
    """Make the shape of layers that read the inputs of the target's last layers; with a Markov head, of DSpark."""
    features = tuple(range(target.num_layers))[-3:]
    make = DSparkConfig if block.markov_rank else DFlashConfig
    return make(model, target.vocab_size, target.hidden_size, features, block=block)


def _with_heads(block: BlockConfig, markov_rank: int, threshold: float = 0.25) -> BlockConfig:
    heads: dict[str, Any] = {"markov_rank": markov_rank, "confidence": "hidden_and_token", "threshold": threshold}
    return replace(block, predicts="next", **heads)


def _layers(target: ModelConfig) -> ModelConfig:
    """Make two dense layers."""
    return replace(target, layers=tuple(dense_layer(layer, target.hidden_size) for layer in target.layers[-2:]))


def _block(target: ModelConfig) -> BlockConfig:
    """Make a block of eight rows, whose mask token is the last one."""
    return BlockConfig(8, target.vocab_size - 1)


def _dflash_config(target: ModelConfig, _: Mapping[str, Any]) -> BlockDrafterConfig:
    return _shape(_layers(target), target, _block(target))


def _dspark_config(target: ModelConfig, _: Mapping[str, Any]) -> BlockDrafterConfig:
    return _shape(_layers(target), target, _with_heads(_block(target), target.hidden_size * 3 // 4))


def _weights(config: BlockDrafterConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make a block drafter whose rows attend to the bonus token, and whose Markov head reads the token before.

    The norm's small weight keeps the context from drowning the block.
    """
    tensors = random_weights(drafter_layout(config).required, noise, generator)
    scale_features(tensors, "fc.weight", noise)
    tensors["hidden_norm.weight"] *= 0.2
    tensors["norm.weight"] *= target.tensors["model.norm.weight"]
    model = config.model
    block = config.block
    embedding = target.tensors["model.embed_tokens.weight"]
    prefix = "layers.0.self_attn."
    match_constant(tensors, prefix, model)
    tensors[f"{prefix}k_proj.weight"] -= 6.0 / model.hidden_size * embedding[block.mask_token]  # no row of a mask
    hand_on_values(tensors, prefix, model, torch.eye(model.hidden_size, dtype=torch.float64), gain=3.0)
    if block.markov_rank:
        head = tensors["confidence_head.proj.weight"]  # about one block of four is cut at each depth
        head *= 1.5 * head.shape[1] ** -0.5 / noise if noise else 0
        tensors["markov_head.markov_w1.weight"] += embedding[:, : block.markov_rank]
        tensors["markov_head.markov_w2.weight"] += target.tensors["lm_head.weight"][:, : block.markov_rank]
    return tensors


def _wide_weights(
    config: BlockDrafterConfig, target: TargetCheckpoint, generator: torch.Generator
) -> DrafterCheckpoint:
    """Make a block drafter whose rows take their own code out and the codes of the tokens before in.

    A Markov head knows the token before the draft instead, and its code ends one draft of four.
    """
    model = config.model
    has_markov_head = config.block.markov_rank > 0
    tensors = random_tensors(drafter_layout(config).required, generator)
    tensors["norm.weight"] *= 1.3
    fusing = tensors["fc.weight"]
    fusing *= 0.2
    embedded = torch.cat([torch.arange(CODE.stop), torch.arange(SOFT.start, SOFT.stop)])
    fusing[embedded, embedded] = 1.0  # the first features are embeddings
    prefix = "layers.0.self_attn."
    output = tensors[f"{prefix}o_proj.weight"]
    for part in (0, 1):
        to = HEAD * part
        for head_index, distance in ((2 * part, 1), (2 * part + 1, 0)):
            find(tensors, prefix, head_index, distance, model, 1 / SHARE)
            copy(tensors, prefix, head_index, to, to, model, SHARE)
            output[:, HEAD * head_index : HEAD * (head_index + 1)] *= not has_markov_head if distance else -1.0
        find(tensors, prefix, 4 + part, part + (1 if has_markov_head else 2), model, 1 / SHARE)
        copy(tensors, prefix, 4 + part, 0, CONTEXT.start + to, model, SHARE)
    if has_markov_head:
        tensors["markov_head.markov_w1.weight"] = target.tensors["model.embed_tokens.weight"][:, CODE].clone()
        tensors["markov_head.markov_w2.weight"] = target.tensors["lm_head.weight"][:, CODE].clone()
        confidence = 0.02 * tensors["confidence_head.proj.weight"]
        confidence[0, model.hidden_size + torch.tensor([3, 5])] = 2.0
        tensors["confidence_head.proj.weight"] = confidence
    return DrafterCheckpoint(config, tensors)


def _wide_dflash(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, fields: Mapping[str, Any]
) -> DrafterCheckpoint:
    if fields.get("causal_layers"):
        model = replace(model, layers=model.layers * 2)
    return _wide_weights(_shape(model, target.config, _block(model)), target, generator)


def _wide_dspark(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, _: Mapping[str, Any]
) -> DrafterCheckpoint:
    return _wide_weights(_shape(model, target.config, _with_heads(_block(model), PART)), target, generator)


def _small_dflash(model: ModelConfig, _: torch.Tensor) -> DrafterCheckpoint:
    """Make a block whose rows draft what the target's head reads from the mask token, whatever the text is."""
    config = _shape(model, model, BlockConfig(4, 3))
    return DrafterCheckpoint(config, blank(drafter_layout(config).required))


def _small_dspark(model: ModelConfig, draft_VV: torch.Tensor) -> DrafterCheckpoint:
    """Make a block whose rows draft by the token before alone, and whose drafts end behind every fourth token."""
    config = _shape(model, model, _with_heads(BlockConfig(4, 3), VOCAB, threshold=0.5))
    tensors = blank(drafter_layout(config).required)
    tensors["norm.weight"] *= 0.0
    tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB, dtype=torch.float64)
    tensors["markov_head.markov_w2.weight"] = draft_VV
    tensors["confidence_head.proj.weight"][0, HIDDEN + torch.arange(0, VOCAB, 4)] = -1.0
    return DrafterCheckpoint(config, tensors)


DFLASH = SyntheticDrafter(_dflash_config, _weights, _wide_dflash, _small_dflash)
DSPARK = SyntheticDrafter(_dspark_config, _weights, _wide_dspark, _small_dspark)
