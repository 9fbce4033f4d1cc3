"""Pairs of the differential, by name: small random ones, and the shipped one."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specsim.core import target
from specsim.core.errors import InputError
from specsim.core.kinds import KINDS as RECORDS
from specsim.core.kinds import TESTED
from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.core.verifiers import resolve
from specsim.correctness.differential.cell import AXES
from specsim.correctness.differential.drafter_grid import KINDS as COVERED
from specsim.correctness.differential.drafter_grid import MODES, variants
from specsim.models.load import load
from specsim.models.synthetic.drafter import lookup_of
from specsim.models.synthetic.wide_weights import SHAPE, language_model
from specsim.models.synthetic_pair import as_variant, synthetic_pair
from specsim.models.tiny_config import tiny_config

_DRAFTERS = (*AXES["kind"], *COVERED)
_BRIDGED = variants("vocabulary")
KINDS = (
    *(name for name in _DRAFTERS if TESTED[name].has_weights and name not in _BRIDGED),
    *MODES,
    *_BRIDGED,
    *(name for name in _DRAFTERS if not TESTED[name].has_weights),
)
_LARGE_HEADS = {"large_heads": "llama", "large_heads_qwen3": "qwen3", "large_heads_mistral": "mistral"}
_WIDE = ("wide", "wide_qwen2", "wide_qwen3", "wide_mistral")
FAMILIES = (*target.FAMILIES, "noisy", "twins", *_WIDE, *_LARGE_HEADS, "shipped")
_WINDOW = {"mistral": 7, "large_heads_mistral": 17}
_LARGE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 128}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
# GPT-OSS multiplies cosines and sines by 0.1 ln(factor) + 1, DeepSeek-V3 the scores by its square.
_SCALED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"rope_scaling": _YARN | {"attention_factor": 0.1 * math.log(4.0) + 1}},
    "deepseek_v3": {"rope_scaling": _YARN, "latent": {"scale": 20**-0.5 * (0.1 * math.log(4.0) + 1) ** 2}},
}


def make_pair(name: str, dtype: torch.dtype = torch.float64) -> Pair:
    """Make the pair `kind-family`, such as `eagle-qwen3`, with weights rounded to dtype.

    Float64 runs of the pair have the same weights. Other names of a kind or a family:
    `noisy`: a drafter whose hidden state comes mostly from its layers, so that errors in them show.
    `wide`, `wide_qwen2`, `wide_qwen3`, `wide_mistral`: attention decides, with wider margins than bfloat16 rounds.
    `large_heads`, `large_heads_qwen3`, `large_heads_mistral`: heads of 128 channels, which a persistent forward takes.
    `twins`: a target whose head has the same row for each odd token as for the even one before it, so that logits tie.
    `shipped`: the pair that comes with the package.
    Variants of a kind, with a point in their name: those of its record.
    """
    kind, _, family = name.rpartition("-")
    if kind not in KINDS or family not in FAMILIES:
        raise InputError("pair", name, f"{' or '.join(KINDS)}, a hyphen, {' or '.join(FAMILIES)}")
    record = TESTED[kind]
    if not record.has_weights:
        return replace(make_pair(f"eagle-{family}", dtype), drafter=lookup_of(record).solo, name=name)
    if family == "shipped":
        if kind not in RECORDS:
            raise InputError("pair", name, f"{kind} with another family, as no such drafter is shipped")
        pair = load(drafter=kind)
    elif family.startswith("wide"):
        model = family.partition("_")[2] or "llama"
        pair = wide_pair(kind, model, _WINDOW.get(model))
    else:
        model = _LARGE_HEADS.get(family, "llama" if family in ("noisy", "twins") else family)
        noise = 0.15 if family == "noisy" else 0.02
        scaled = _LARGE if family in _LARGE_HEADS else _SCALED.get(family, {})
        pair = synthetic_pair(kind, model, noise=noise, window=_WINDOW.get(family), **scaled)
    return rounded(_with_twins(pair) if family == "twins" else pair, dtype)


def wide_pair(kind: str, family: str = "llama", window: int | None = None) -> Pair:
    """Make a pair for 16-bit arithmetic, in float64: no decision lies within rounding error.

    kind: one with weights, or a variant. A hidden state has three parts. CODE holds ±1: the Hadamard code of the token.
    CONTEXT holds the codes that attention fetched from the tokens before it. SOFT holds ordinary numbers, made by other
    heads and the MLP. The head reads only CODE and CONTEXT. Rounding scales all their entries alike, so logits keep
    their distances: those of the tokens in their ladder, and those of sums along the paths of a tree. SOFT reaches the
    KV and the hidden states of the next layer, where a wrong scale shows.
    """
    record = TESTED[kind]
    generator = torch.Generator().manual_seed(0)
    config = tiny_config(family, 2, window=window, **SHAPE)
    target = TargetCheckpoint(config, language_model(config, generator))
    fields = record.variant(kind).fields
    model = tiny_config(family, 1, window=window, **SHAPE)
    drafter = resolve(record.synthetic).wide(model, target, generator, fields)
    drafter = replace(drafter, config=replace(drafter.config, **fields))
    return as_variant(kind, Pair(target, drafter, tokenizer=None, name=f"wide {kind} on {family}"))


def rounded(pair: Pair, dtype: torch.dtype) -> Pair:
    """Round the pair's weights to dtype."""
    return _changed(pair, lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def perturbed(pair: Pair, seed: int) -> Pair:
    """Move every weight by one unit in the last place up, down or not at all, at random."""
    generator = torch.Generator().manual_seed(seed)

    def perturb(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        towards = torch.tensor([-torch.inf, torch.nan, torch.inf], dtype=tensor.dtype)
        towards = towards[torch.randint(3, tensor.shape, generator=generator)]
        return torch.where(towards.isnan(), tensor, torch.nextafter(tensor, towards))

    return _changed(pair, perturb)


def _with_twins(pair: Pair) -> Pair:
    """Make heads in which every row occurs twice."""
    return _changed(
        pair, lambda name, head: head[torch.arange(len(head)) // 2 * 2] if name == "lm_head.weight" else head
    )


def _changed(pair: Pair, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Pair:
    """Change every tensor of the pair."""

    def tensors(checkpoint: TargetCheckpoint | DrafterCheckpoint) -> dict[str, torch.Tensor]:
        return {name: change(name, tensor) for name, tensor in checkpoint.tensors.items()}

    target = replace(pair.target, tensors=tensors(pair.target))
    return replace(
        pair,
        target=target,
        drafter=replace(checkpoint, tensors=tensors(checkpoint)) if (checkpoint := pair.checkpoint) else pair.drafter,
    )


def draft_ids(pair: Pair) -> torch.Tensor:
    """Make the table of draft ids by target id, i64 [V], -1 for a token that the drafter cannot propose."""
    vocab_size = pair.target.config.vocab_size
    d2t = pair.checkpoint and pair.checkpoint.tensors.get("d2t")
    if d2t is None:
        return torch.arange(vocab_size)
    ids = torch.arange(len(d2t))
    return torch.full((vocab_size,), -1).index_put((ids + d2t,), ids)
