"""Synthetic pairs: a small random target, and a drafter whose noise sets how often it agrees.

The embedding of the target's last token dominates its residual stream, so its next token depends mostly on that token.
The drafter copies the same embedding and reads it through the same head. So it proposes the same token, unless its
noise or the context that it does not model changes the decision.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from specsim.core.block import BlockConfig, BlockDrafterConfig, DFlashConfig, DSparkConfig
from specsim.core.drafter import BLOCK_KINDS, DrafterConfig
from specsim.core.eagle import Eagle3Config, EagleConfig
from specsim.core.errors import require_choice
from specsim.core.frozen_kv import FrozenKVConfig
from specsim.core.mtp import MtpConfig
from specsim.core.p_eagle import PEagleConfig
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.layout import Layout, drafter_layout, target_layout
from specsim.models.llama_layer import dense_layer
from specsim.models.tiny_config import tiny_config

Tensors = dict[str, torch.Tensor]
# Llama 3.1's rotary scaling, for contexts as short as these pairs'.
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_target(config: ModelConfig, seed: int = 0, context: float = 0.1, sharpness: float = 0.5) -> TargetCheckpoint:
    """Make random weights of any family.

    context: scale of the layers' weights, against embeddings whose entries are ±1. sharpness: scale of the head.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = _random(target_layout(config), context, generator)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].sign()
    tensors["model.embed_tokens.weight"][:, 0] = 1.0
    tensors["lm_head.weight"] *= sharpness / context
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return TargetCheckpoint(config, tensors)


def synthetic_pair(
    kind: str = "eagle3",
    family: str = "llama",
    *,
    seed: int = 0,
    noise: float = 0.02,
    num_layers: int = 2,
    fields: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Pair:
    """Make a pair without a tokenizer, whose first draft is accepted about 4 times in 10 at temperature 1.

    kind: of the drafter, or `eagle3.1`: an EAGLE-3 head with every norm of that version. EAGLE-3 heads draft from
    seven eighths of the vocabulary, P-EAGLE heads have two layers, MTP has three modules, DSpark drafts the next token
    and has both heads. noise: more of it means less agreement. fields: other fields of DrafterConfig. changes:
    arguments of tiny_config.
    """
    require_choice("kind", kind, tuple(_MAKE))
    target = random_target(tiny_config(family, num_layers, **changes), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    config = replace(_config(kind, target.config), **(fields or {}))
    drafter = DrafterCheckpoint(config, _MAKE[kind](config, target, noise, generator))
    return Pair(target=target, drafter=drafter, tokenizer=None, name=f"synthetic {kind} on {family}")


def _config(kind: str, target: ModelConfig) -> DrafterConfig:
    """Make the shape of a drafter with layers as its target has them.

    EAGLE heads have a Llama layer where those are not dense. A drafter with a head for the target's vocabulary is half
    as wide again, to tell the widths apart.
    """
    model = replace(target, layers=target.layers[-1:])
    dense = replace(model, layers=(dense_layer(target.layers[-1], target.hidden_size),))
    wide = replace(model, hidden_size=target.hidden_size * 3 // 2, tie_word_embeddings=False)
    if kind in BLOCK_KINDS:
        return _block_config(kind, target)
    sizes = target.vocab_size, target.hidden_size
    if kind == "mtp":
        return MtpConfig(replace(model, layers=3 * model.layers), *sizes, num_modules=3)
    if kind == "frozen-kv":
        layers = tuple(replace(layer, mlp=dense_layer(layer, target.hidden_size).mlp) for layer in target.layers[-2:])
        return FrozenKVConfig(replace(wide, layers=layers), *sizes)
    if kind == "standalone":
        return StandaloneConfig(wide, *sizes)
    if kind == "eagle":
        return EagleConfig(dense, *sizes)
    layers = tuple(range(target.num_layers))
    sizes = target.vocab_size * 7 // 8, target.hidden_size
    if kind == "eagle3":
        return Eagle3Config(dense, *sizes, layers[-3:])
    if kind == "p-eagle":
        mask = target.vocab_size - 1
        return PEagleConfig(replace(dense, layers=2 * dense.layers), *sizes, layers[-3:], mask_token_id=mask)
    return Eagle3Config(dense, *sizes, layers, norm_before_fc=True, fc_norm=True, norm_output=True)


def _block_config(kind: str, target: ModelConfig) -> DrafterConfig:
    """Make the shape of a block of eight rows and two dense layers, which reads all layers' inputs."""
    block = BlockConfig(8, target.vocab_size - 1)
    if kind == "dspark":
        rank = target.hidden_size * 3 // 4
        block = replace(block, predicts="next", markov_rank=rank, confidence="hidden_and_token", threshold=0.25)
    model = replace(target, layers=tuple(dense_layer(layer, target.hidden_size) for layer in target.layers[-2:]))
    features = tuple(range(target.num_layers))[-3:]
    make = DFlashConfig if kind == "dflash" else DSparkConfig
    return make(model, target.vocab_size, target.hidden_size, features, block=block)


def _random(layout: Layout, scale: float, generator: torch.Generator) -> Tensors:
    """Draw normal weights of this scale, and norms around 1 with half of it."""
    tensors = {}
    for name, shape in layout.items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = 1 + scale / 2 * values if "norm" in name else scale * values
    return tensors


def _eagle(config: EagleConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make an EAGLE head whose fc copies the embedding."""
    required, optional = drafter_layout(config)
    tensors = _random(required | optional, noise, generator)
    tensors["embed_tokens.weight"] = target.tensors["model.embed_tokens.weight"]
    _copy_embedding(tensors["fc.weight"])
    return tensors


def _eagle3(config: Eagle3Config, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make an EAGLE-3 head whose attention to the own row replaces the residual by the new token's embedding."""
    vocab = config.model.vocab_size
    chosen = torch.linspace(0, vocab - 1, config.draft_vocab_size).long()
    layout, _ = drafter_layout(config)
    tensors = _random(layout, noise, generator)
    tensors["fc.weight"] *= tensors["fc.weight"].shape[1] ** -0.5 / noise if noise else 0
    tensors["lm_head.weight"] = target.tensors["lm_head.weight"][chosen]
    tensors["d2t"] = chosen - torch.arange(len(chosen))
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    _attend_to_itself(tensors, config.model)
    return tensors


def _mtp(config: MtpConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make modules that copy the embedding, each with noise of its own, and have the target's final norm."""
    tensors = _random(drafter_layout(config).required, noise, generator)
    for index in range(config.num_modules):
        _copy_embedding(tensors[f"modules.{index}.eh_proj.weight"])
        tensors[f"modules.{index}.norm.weight"] *= target.tensors["model.norm.weight"]
    return tensors


def _frozen_kv(config: FrozenKVConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make a drafter whose first projection copies the embedding, which the target's head reads."""
    tensors = _random(drafter_layout(config).required, noise, generator)
    _copy_embedding(tensors["pre_projection.weight"])
    tensors["lm_head.weight"] = _widened_head(config, target)
    return tensors


def _standalone(
    config: StandaloneConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator
) -> Tensors:
    """Make a model with the target's embedding and head, and layers of its own."""
    tensors = _random(drafter_layout(config).required, noise, generator)
    embedding = target.tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([embedding, embedding], 1)[:, : config.model.hidden_size]
    tensors["lm_head.weight"] = _widened_head(config, target)
    return tensors


def _dflash(config: BlockDrafterConfig, target: TargetCheckpoint, noise: float, generator: torch.Generator) -> Tensors:
    """Make a block drafter whose rows attend to the bonus token, and whose Markov head reads the token before.

    The norm's small weight keeps the context from drowning the block.
    """
    tensors = _random(drafter_layout(config).required, noise, generator)
    tensors["fc.weight"] *= tensors["fc.weight"].shape[1] ** -0.5 / noise if noise else 0
    tensors["hidden_norm.weight"] *= 0.2
    tensors["norm.weight"] *= target.tensors["model.norm.weight"]
    model = config.model
    block = config.block
    embedding = target.tensors["model.embed_tokens.weight"]
    prefix = "layers.0.self_attn."
    for name in ("q", "k"):
        tensors[f"{prefix}{name}_proj.weight"][:, 0] += 4.0
        if model.heads.has_head_norms:
            tensors[f"{prefix}{name}_norm.weight"] *= 4.0
    tensors[f"{prefix}k_proj.weight"] -= 6.0 / model.hidden_size * embedding[block.mask_token]  # no row of a mask
    _hand_on_values(tensors, prefix, model, torch.eye(model.hidden_size, dtype=torch.float64), gain=3.0)
    if block.markov_rank:
        head = tensors["confidence_head.proj.weight"]  # about one block of four is cut at each depth
        head *= 1.5 * head.shape[1] ** -0.5 / noise if noise else 0
        tensors["markov_head.markov_w1.weight"] += embedding[:, : block.markov_rank]
        tensors["markov_head.markov_w2.weight"] += target.tensors["lm_head.weight"][:, : block.markov_rank]
    return tensors


def _copy_embedding(projection: torch.Tensor) -> None:
    """Make a projection of embedding and hidden state copy the embedding's features, the first of them twice."""
    width = projection.shape[1] // 2
    row = torch.arange(len(projection))
    projection[row, row % width] += 1.0


def _widened_head(config: DrafterConfig, target: TargetCheckpoint) -> torch.Tensor:
    """Make a head of the drafter's width that reads what the target's head reads, in the first features."""
    head = target.tensors["lm_head.weight"] * target.tensors["model.norm.weight"]
    return torch.nn.functional.pad(head, (0, config.model.hidden_size - head.shape[1]))


def _attend_to_itself(tensors: Tensors, model: ModelConfig) -> None:
    """Give queries and keys a constant feature, so that rotation makes distance 0 the best match.

    The value is the embedding minus the hidden state, which the residual adds back.
    """
    prefix = "midlayer.self_attn."
    identity = torch.eye(model.hidden_size, dtype=torch.float64)
    for name in ("q", "k"):
        tensors[f"{prefix}{name}_proj.weight"][:, 0] += 4.0
        if model.heads.has_head_norms:  # they would take the factor out again
            tensors[f"{prefix}{name}_norm.weight"] *= 4.0
    _hand_on_values(tensors, prefix, model, torch.cat([identity, -identity], dim=1))


def _hand_on_values(tensors: Tensors, prefix: str, model: ModelConfig, values: torch.Tensor, gain: float = 1.0) -> None:
    """Make an attention add `gain` times these values of what it attends to, [H, width of a row]."""
    tensors[f"{prefix}v_proj.weight"][: model.hidden_size] += values
    channel = torch.arange(model.hidden_size)  # of the values, which the first query head of each group reads
    group = model.num_heads // model.num_kv_heads
    column = channel // model.head_dim * group * model.head_dim + channel % model.head_dim
    tensors[f"{prefix}o_proj.weight"][:, column] += gain * torch.eye(model.hidden_size, dtype=torch.float64)


_MAKE: dict[str, Callable[[Any, TargetCheckpoint, float, torch.Generator], Tensors]] = {
    **dict.fromkeys(BLOCK_KINDS, _dflash),
    "eagle": _eagle,
    "eagle3": _eagle3,
    "eagle3.1": _eagle3,
    "p-eagle": _eagle3,
    "mtp": _mtp,
    "frozen-kv": _frozen_kv,
    "standalone": _standalone,
}
