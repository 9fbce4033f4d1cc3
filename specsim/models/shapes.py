"""Shapes of models, whole or as one GPU's tensor-parallel slice, and pairs of these shapes with random weights.

The weights are made on the device that uses them, for timing only.
"""

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from specsim.core.arguments import check_arguments
from specsim.core.drafter import DrafterConfig
from specsim.core.eagle import Eagle3Config, EagleConfig
from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.checkpoint.fields import read_json
from specsim.models.checkpoint.layout import Layout, target_layout
from specsim.models.checkpoint.model_config import model_config
from specsim.models.llama_layer import llama_layer

_CONFIGS = Path(__file__).parent / "shape_configs"
NAMES = tuple(sorted(path.stem for path in _CONFIGS.glob("*.json")))
_SLICE = re.compile(r"(.+)-tp([1-9][0-9]*)-slice")
_ALLOWED = f"{', '.join(NAMES)}, a config.json or a folder with one, each perhaps with the suffix -tpK-slice"


@dataclass(frozen=True, slots=True)
class Shape:
    """A target's shape, whole or one GPU's slice of it."""

    name: str
    config: ModelConfig  # without end tokens, which random weights do not learn
    tensor_parallel: int = 1  # number of GPUs that share the model


@check_arguments
def shape(name_or_path: str | Path) -> Shape:
    """Find the shape of a name, of a config.json or of a folder with one.

    The suffix `-tpK-slice` gives one GPU's slice, as one of K GPUs computes it under tensor parallelism. Heads,
    intermediate size and vocabulary are divided by K, and so are KV heads, down to one (GPUs beyond their number hold
    copies). Layers and hidden size are those of the model. No collective is run or timed, and the tokens are those of a
    small model of that shape. The embedding is cut like the head, as a forward reads only its own rows. Raises
    InputError where K does not divide a size.
    """
    text = str(name_or_path)
    if whole_shape := _whole_shape(text):
        return whole_shape
    sliced = _SLICE.fullmatch(text)
    if sliced and (whole_shape := _whole_shape(sliced[1])):
        return _slice(whole_shape, int(sliced[2]), text)
    raise InputError("shape", text, _ALLOWED)


def _whole_shape(text: str) -> Shape | None:
    """Find a shape that is not a slice, None where no such name or file exists."""
    path = _CONFIGS / f"{text}.json" if text in NAMES else Path(text).expanduser()
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file() and path.name != "config.json":
            return None
    except (OSError, ValueError):  # not a path: too long, or with a zero byte
        return None
    return Shape(text, replace(model_config(read_json(path)), eos_token_ids=()))


def _slice(whole_shape: Shape, count: int, name: str) -> Shape:
    model = whole_shape.config
    divided = {field: getattr(model, field) for field in ("num_heads", "intermediate_size", "vocab_size")}
    fewer, more = sorted((model.num_kv_heads, count))
    if any(size % count for size in divided.values()) or more % fewer:
        sizes = ", ".join(f"{field} {size}" for field, size in divided.items())
        allowed = f"tpK with a K that divides {sizes}, and divides num_kv_heads {model.num_kv_heads} or is a multiple"
        raise InputError("shape", name, allowed)
    sizes = {field: size // count for field, size in divided.items()}
    heads = {"num_heads": sizes["num_heads"], "num_kv_heads": max(1, model.num_kv_heads // count)}
    mlp = replace(model.mlp, size=sizes["intermediate_size"])
    layers = tuple(replace(layer, mlp=mlp) for layer in model.with_heads(**heads).layers)
    return Shape(name, replace(model, layers=layers, vocab_size=sizes["vocab_size"]), count)


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Draw uniformly random token ids, the same ones in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()


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
    head = layout.pop("lm_head.weight", optional.get("lm_head.weight", ()))
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
