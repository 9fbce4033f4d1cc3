"""Tensors of a language model, which is a target or a standalone drafter."""

from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from specsim.core.errors import InputError
from specsim.core.pair import TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.expert_tensors import gather_experts
from specsim.models.checkpoint.layout import target_layout
from specsim.models.checkpoint.module_key import module_key
from specsim.models.checkpoint.weights import Stored, by_name, check_layout

_ALWAYS = ("embed_tokens.weight", "layers.0.input_layernorm.weight", "norm.weight")


def is_language_model(names: Collection[str]) -> bool:
    """Check whether tensors, by their names without `model.`, include those of a language model."""
    return all(name in names for name in _ALWAYS)


def load_language_model(
    config: ModelConfig, folder: Path, stored: Iterable[Stored], num_modules: int
) -> TargetCheckpoint:
    """Check the tensors of a language model without its `num_modules` MTP modules, with a tied head as the embedding.

    Raises InputError with file and key for a missing, extra or misshapen tensor.
    """
    own = [entry for entry in stored if module_key(entry.key, config.num_layers, num_modules) is None]
    required = target_layout(config)
    optional = {}
    if config.tie_word_embeddings:
        optional = {"lm_head.weight": required.pop("lm_head.weight")}
    named = gather_experts(by_name(own, _canonical), config, "model.layers")
    tensors = check_layout(named, folder, required, optional)
    if config.tie_word_embeddings:
        embedding = tensors["model.embed_tokens.weight"]
        if not torch.equal(tensors.get("lm_head.weight", embedding), embedding):
            allowed = "equal to the embedding, or absent, where tie_word_embeddings is true"
            raise InputError(f"lm_head.weight in {folder}", "another tensor", allowed)
        tensors["lm_head.weight"] = embedding
    return TargetCheckpoint(config, tensors)


def _canonical(key: str) -> str:
    return key if key.startswith(("model.", "lm_head.")) else f"model.{key}"
