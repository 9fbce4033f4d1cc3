"""Names of MTP modules' tensors, in a folder of their own or in the language model's, in every published format.

Sources: vllm-project/vllm, vllm/model_executor/models/ deepseek_mtp.py (DeepSeek-V3), glm4_moe_mtp.py (GLM-4.5),
qwen3_next_mtp.py and mimo_mtp.py; vllm-project/speculators, src/speculators/models/mtp/model_definitions.py.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from specsim.models.checkpoint.fields import Fields

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
    if found := re.fullmatch(r"modules\.(\d+)\.(.+)", bare):
        return ModuleKey(int(found[1]), found[2])
    if found := re.fullmatch(r"mtp_layers\.(\d+)\.(.+)", bare):
        return ModuleKey(int(found[1]), _renamed(found[2], _XIAOMI), is_swapped=key != bare)
    if found := re.fullmatch(r"mtp\.layers\.(\d+)\.(.+)", bare):
        return ModuleKey(int(found[1]), found[2])
    if found := re.fullmatch(r"mtp\.(.+)", bare):
        return ModuleKey(None, _renamed(found[1], _QWEN))
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", bare)
    if not found or not num_layers <= int(found[1]) < num_layers + (num_modules or 0):
        return None
    return ModuleKey(int(found[1]) - num_layers, _renamed(found[2], {"shared_head.norm": "norm"}))


def num_modules_of(fields: Fields) -> int:
    """Read how many MTP modules a config.json names, 0 if none."""
    return fields.integer("num_nextn_predict_layers", default=0, least=0)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """Replace the module part of a name such as `fc.weight`."""
    module, dot, part = name.rpartition(".")
    return f"{names.get(module, module)}{dot}{part}"
