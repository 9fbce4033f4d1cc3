"""Pairs for 16-bit arithmetic: attention decides which token comes next, and no decision lies within rounding error.

A hidden state has three parts. CODE holds ±1: the Hadamard code of the token. CONTEXT holds the codes that attention
fetched from the tokens before it. SOFT holds ordinary numbers, made by other heads and the MLP. The head reads only
CODE and CONTEXT. Rounding scales all their entries alike, so logits keep their distances: those of the tokens in their
ladder, and those of sums along the paths of a tree. SOFT reaches the KV and the hidden states of the next layer, where
a wrong scale shows.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specsim.core.block import BlockConfig, DFlashConfig, DSparkConfig
from specsim.core.eagle import Eagle3Config, EagleConfig
from specsim.core.frozen_kv import FrozenKVConfig
from specsim.core.mtp import MtpConfig
from specsim.core.p_eagle import PEagleConfig
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import ModelConfig
from specsim.correctness.differential.wide_weights import (
    CODE,
    CONTEXT,
    HEAD,
    PART,
    SHAPE,
    SHARE,
    SOFT,
    Tensors,
    copy,
    embedding,
    find,
    head,
    look_for,
    random_tensors,
)
from specsim.models.checkpoint.layout import drafter_layout, target_layout
from specsim.models.tiny_config import tiny_config

MODULES = 3  # of MTP


def wide_pair(
    kind: str,
    family: str = "llama",
    window: int | None = None,
    seed: int = 0,
    fields: Mapping[str, Any] | None = None,
) -> Pair:
    """Make a pair of this kind of drafter on a target of this family, in float64.

    kind: one with weights, or `eagle3.1`. fields: other fields of its config.
    """
    generator = torch.Generator().manual_seed(seed)
    config = tiny_config(family, 2, window=window, **SHAPE)
    target = TargetCheckpoint(config, _model(config, generator))
    fields = fields or {}
    make = partial(_frozen_kv, distance=1) if fields.get("position") == "next" else _MAKE[kind]
    drafter = make(tiny_config(family, 1, window=window, **SHAPE), target, generator)
    drafter = replace(drafter, config=replace(drafter.config, **fields))
    return Pair(target=target, drafter=drafter, tokenizer=None, name=f"wide {kind} on {family}")


def _model(config: ModelConfig, generator: torch.Generator) -> Tensors:
    """Make a language model; with one layer it knows one token before, with two the token before that too."""
    tensors = random_tensors(target_layout(config), generator)
    tensors["model.embed_tokens.weight"] = embedding(config.vocab_size, generator)
    tensors["lm_head.weight"] = head(config.vocab_size)
    tensors["model.norm.weight"] *= 1.3
    for layer, norm in enumerate((SHARE, 1.0)[: config.num_layers]):  # of the layer's input, approximately
        prefix = f"model.layers.{layer}.self_attn."
        find(tensors, prefix, 0, 1 + layer, config, 1 / norm)
        copy(tensors, prefix, 0, 0, CONTEXT.start + HEAD * layer, config, norm)
    return tensors


def _eagle(model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator) -> DrafterCheckpoint:
    config = EagleConfig(model, model.vocab_size, model.hidden_size)
    required, _ = drafter_layout(config)
    tensors = random_tensors(required, generator)
    tensors["embed_tokens.weight"] = target.tensors["model.embed_tokens.weight"]
    both = torch.arange(SOFT.start)
    tensors["fc.weight"][both, both] = 1.0
    prefix = "layers.0.self_attn."
    _read_two_before(tensors, prefix, model)
    return DrafterCheckpoint(config, tensors)


def _eagle3(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, kind: str = "eagle3"
) -> DrafterCheckpoint:
    """Make an EAGLE-3 or P-EAGLE head in whose residual two heads replace the hidden state's code by the new token's.

    Norms of EAGLE-3.1 leave code and context as they are, up to a factor that the next norm takes out.
    """
    hidden = model.hidden_size
    vocab = model.vocab_size
    chosen = torch.linspace(0, vocab - 1, vocab * 7 // 8).long()
    feature_layers = tuple(range(target.config.num_layers))[-3:]
    make = PEagleConfig if kind == "p-eagle" else Eagle3Config
    model = replace(model, layers=2 * model.layers) if kind == "p-eagle" else model
    norms = dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), kind == "eagle3.1")
    config = make(model, len(chosen), hidden, feature_layers, norm_before_residual=True, **norms)
    layout, _ = drafter_layout(config)
    tensors = random_tensors(layout, generator)
    tensors["lm_head.weight"] = target.tensors["lm_head.weight"][chosen]
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
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


def _mtp(model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator) -> DrafterCheckpoint:
    """Make modules that find the tokens before in their own rows, and read the hidden state in SOFT only."""
    layers = replace(model, layers=MODULES * model.layers)
    config = MtpConfig(layers, model.vocab_size, model.hidden_size, num_modules=MODULES)
    tensors = random_tensors(drafter_layout(config).required, generator)
    both = torch.arange(SOFT.start)
    for module in range(MODULES):
        tensors[f"modules.{module}.eh_proj.weight"][both, both] = SHARE
        tensors[f"modules.{module}.norm.weight"] *= 1.3
        _read_two_before(tensors, f"modules.{module}.self_attn.", model)
    return DrafterCheckpoint(config, tensors)


def _read_two_before(tensors: Tensors, prefix: str, model: ModelConfig) -> None:
    """Make two heads of one KV head copy the codes of the tokens one and two before into CONTEXT."""
    find(tensors, prefix, 0, 1, model)
    find(tensors, prefix, 1, 2, model)
    copy(tensors, prefix, 0, 0, CONTEXT.start, model)
    copy(tensors, prefix, 1, None, CONTEXT.start + HEAD, model)


def _frozen_kv(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, distance: int = 0
) -> DrafterCheckpoint:
    """Make a drafter whose first heads find the last two tokens in the KV of the target's last layer.

    They are those before the root, so later drafts of a path read a context that is not theirs. distance: of the
    drafts' position from the last token in the KV.
    """
    config = FrozenKVConfig(model, model.vocab_size, model.hidden_size)
    tensors = random_tensors(drafter_layout(config).required, generator)
    both = torch.arange(SOFT.start)
    tensors["pre_projection.weight"][both, both] = 1.0
    tensors["lm_head.weight"] = target.tensors["lm_head.weight"]
    tensors["norm.weight"] *= 1.3
    prefix = "layers.0.self_attn."
    for head_index in (0, 1):
        look_for(tensors, prefix, head_index, distance + head_index, model)
        copy(tensors, prefix, head_index, None, CONTEXT.start + HEAD * head_index, model)
    return DrafterCheckpoint(config, tensors)


def _block(
    model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator, kind: str = "dflash"
) -> DrafterCheckpoint:
    """Make a block drafter whose rows take their own code out and the codes of the tokens before in.

    The Markov head of DSpark knows the token before the draft instead, and its code ends one draft of four.
    """
    is_own = kind == "dflash"
    block = BlockConfig(8, model.vocab_size - 1)
    if not is_own:
        block = replace(block, predicts="next", markov_rank=PART, confidence="hidden_and_token", threshold=0.25)
    features = tuple(range(target.config.num_layers))[-3:]
    make = DFlashConfig if is_own else DSparkConfig
    config = make(model, model.vocab_size, model.hidden_size, features, block=block)
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
            output[:, HEAD * head_index : HEAD * (head_index + 1)] *= is_own if distance else -1.0
        find(tensors, prefix, 4 + part, part + (2 if is_own else 1), model, 1 / SHARE)
        copy(tensors, prefix, 4 + part, 0, CONTEXT.start + to, model, SHARE)
    if block.markov_rank:
        tensors["markov_head.markov_w1.weight"] = target.tensors["model.embed_tokens.weight"][:, CODE].clone()
        tensors["markov_head.markov_w2.weight"] = target.tensors["lm_head.weight"][:, CODE].clone()
        confidence = 0.02 * tensors["confidence_head.proj.weight"]
        confidence[0, model.hidden_size + torch.tensor([3, 5])] = 2.0
        tensors["confidence_head.proj.weight"] = confidence
    return DrafterCheckpoint(config, tensors)


def _standalone(model: ModelConfig, target: TargetCheckpoint, generator: torch.Generator) -> DrafterCheckpoint:
    """Make a language model of one layer."""
    config = StandaloneConfig(model, model.vocab_size, model.hidden_size)
    return DrafterCheckpoint(config, _model(model, generator))


_MAKE = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "eagle3.1": partial(_eagle3, kind="eagle3.1"),
    "p-eagle": partial(_eagle3, kind="p-eagle"),
    "mtp": _mtp,
    "dflash": _block,
    "dspark": partial(_block, kind="dspark"),
    "frozen-kv": _frozen_kv,
    "standalone": _standalone,
}
