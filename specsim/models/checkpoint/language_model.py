"""Tensors of a language model, a target or a standalone drafter, and names of the MTP modules in its folder.

Sources of these names: vllm-project/vllm, vllm/model_executor/models/ deepseek_mtp.py (DeepSeek-V3), glm4_moe_mtp.py
(GLM-4.5), qwen3_next_mtp.py and mimo_mtp.py; vllm-project/speculators, src/speculators/models/mtp/model_definitions.py.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from specsim.core.errors import InputError
from specsim.core.pair import TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.expert_tensors import gather_experts
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.layout import target_layout
from specsim.models.checkpoint.weights import Stored, by_name, check_layout

_XIAOMI = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
_QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}


class ModuleKey(NamedTuple):
    """Name of a tensor in an MTP module."""

    module: int | None  # its number; None: every module has the tensor
    name: str  # below the module, as of ours
    is_swapped: bool = False  # the projection reads the hidden state first, then the embedding


def module_key(key: str, num_layers: int, num_modules: int | None = None) -> ModuleKey | None:
    """Read the name of a tensor: of an MTP module, or None for any other.

    num_layers: of the language model, after which DeepSeek numbers its modules, `num_modules` of them if that is known.
    """
    bare = key.removeprefix("model.")
    if match := re.fullmatch(r"modules\.(\d+)\.(.+)", bare):
        return ModuleKey(int(match[1]), match[2])
    if match := re.fullmatch(r"mtp_layers\.(\d+)\.(.+)", bare):
        return ModuleKey(int(match[1]), _renamed(match[2], _XIAOMI), is_swapped=key != bare)
    if match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", bare):
        return ModuleKey(int(match[1]), match[2])
    if match := re.fullmatch(r"mtp\.(.+)", bare):
        return ModuleKey(None, _renamed(match[1], _QWEN))
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", bare)
    if not match or not num_layers <= int(match[1]) < num_layers + (num_modules or 0):
        return None
    return ModuleKey(int(match[1]) - num_layers, _renamed(match[2], {"shared_head.norm": "norm"}))


def num_modules_of(fields: Fields) -> int:
    """Read how many MTP modules a config.json names, 0 if none."""
    return fields.integer("num_nextn_predict_layers", default=0, least=0)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Replace the module part of a name such as `fc.weight`."""
    module, dot, part = name.rpartition(".")
    return f"{names.get(module, module)}{dot}{part}"


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
    texts = [entry for entry in stored if not _OTHER_SENSES.match(entry.key)]
    entries = [entry for entry in texts if module_key(entry.key, config.num_layers, num_modules) is None]
    required = target_layout(config)
    optional = {}
    if config.tie_word_embeddings:
        optional = {"lm_head.weight": required.pop("lm_head.weight")}
    named = gather_experts(by_name(entries, _canonical), config, "model.layers")
    tensors = check_layout(named, folder, required, optional)
    if config.tie_word_embeddings:
        embedding = tensors["model.embed_tokens.weight"]
        if not torch.equal(tensors.get("lm_head.weight", embedding), embedding):
            allowed = "equal to the embedding, or absent, where tie_word_embeddings is true"
            raise InputError(f"lm_head.weight in {folder}", "another tensor", allowed)
        tensors["lm_head.weight"] = embedding
    return TargetCheckpoint(config, tensors)


# Encoders of images and sounds in a multimodal checkpoint, whose language model is read.
_OTHER_SENSES = re.compile(r"(?:model\.)?(?:vision_tower|vision_model|visual|multi_modal_projector|audio_tower)\.")


def _canonical(key: str) -> str:
    bare = key.removeprefix("model.").removeprefix("language_model.")
    is_wrapped = bare != key.removeprefix("model.")
    key = bare if is_wrapped else key
    return key if key.startswith(("model.", "lm_head.")) else f"model.{key}"
