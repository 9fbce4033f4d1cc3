"""Targets and drafters with weights, from a local folder or the Hugging Face hub."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from specsim.core.drafter import BLOCK_KINDS
from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.standalone import StandaloneConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.block import read_block
from specsim.models.checkpoint.drafter_config import drafter_config
from specsim.models.checkpoint.drafter_kind import drafter_kind
from specsim.models.checkpoint.expert_tensors import gather_experts
from specsim.models.checkpoint.fields import Fields, read_json
from specsim.models.checkpoint.frozen_kv import read_frozen_kv
from specsim.models.checkpoint.layout import drafter_layout, target_layout
from specsim.models.checkpoint.model_config import model_config, read_target_config
from specsim.models.checkpoint.mtp import module_key, num_modules_of, read_mtp
from specsim.models.checkpoint.weights import Stored, by_name, check_layout, read_weights

_HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
_HUB_TEXT = ("*.json", "*.txt", "tokenizer.model")


Read = Callable[[Path], list[Stored]]


def load_target(path_or_hub: str | Path, read: Read = read_weights) -> TargetCheckpoint:
    """Load a target of a supported family, without MTP modules in its folder.

    read: gives the tensors of a folder. Raises InputError with file and key for a missing, extra or misshapen tensor.
    """
    folder = locate("target", path_or_hub)
    config = read_target_config(folder)
    num_modules = num_modules_of(read_json(folder / "config.json"))
    return _load_model(config, folder, read(folder), num_modules)


def _load_model(config: ModelConfig, folder: Path, stored: Iterable[Stored], num_modules: int) -> TargetCheckpoint:
    """Check the tensors of a language model, with a tied head as the embedding."""
    own = [entry for entry in stored if module_key(entry.key, config.num_layers, num_modules) is None]
    required = target_layout(config)
    optional = {}
    if config.tie_word_embeddings:
        optional = {"lm_head.weight": required.pop("lm_head.weight")}
    named = gather_experts(by_name(own, _target_name), config, "model.layers")
    tensors = check_layout(named, folder, required, optional)
    if config.tie_word_embeddings:
        embedding = tensors["model.embed_tokens.weight"]
        if not torch.equal(tensors.get("lm_head.weight", embedding), embedding):
            allowed = "equal to the embedding, or absent, where tie_word_embeddings is true"
            raise InputError(f"lm_head.weight in {folder}", "another tensor", allowed)
        tensors["lm_head.weight"] = embedding
    return TargetCheckpoint(config, tensors)


def load_drafter(
    path_or_hub: str | Path,
    target_config: ModelConfig,
    draft_fields: Mapping[str, Any] | None = None,
    kind: str | None = None,
    read: Read = read_weights,
) -> DrafterCheckpoint:
    """Load a drafter with weights: EAGLE-1/2, EAGLE-3, P-EAGLE, MTP, frozen KV, a block, or a language model.

    draft_fields: replacements for fields of its config.json. kind: `mtp` for the modules in the folder of a language
    model. read: gives the tensors of a folder. Raises InputError as load_target does, and where the drafter does not
    fit its target.
    """
    folder = locate("draft", path_or_hub)
    fields = read_json(folder / "config.json").replaced(draft_fields or {})
    stored = read(folder)
    found = drafter_kind(fields, [entry.key for entry in stored], kind)
    checkpoint = _LOADERS[found](fields, stored, target_config)
    for name in draft_fields or ():
        allowed = f"a field of an {found} config: {', '.join(sorted(fields.read_names))}"
        require(name in fields.read_names, "draft_fields", name, allowed)
    return checkpoint


def _load_eagle(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    folder = fields.file.parent
    config = drafter_config(fields, "eagle", target)
    required, optional = drafter_layout(config)
    if fields.get("bias") is not None:
        bias = {"fc.bias": optional.pop("fc.bias")}
        required |= bias if fields.flag("bias") else {}
    named = by_name(stored, lambda key: key.removeprefix("model."))
    return DrafterCheckpoint(config, check_layout(named, folder, required, optional))


def _load_p_eagle(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    """Load a head whose mask_hidden is stored with leading dimensions of 1, or without."""
    flat = [
        each._replace(tensor=each.tensor.flatten()) if each.key.endswith("mask_hidden") else each for each in stored
    ]
    return _load_eagle3(fields, flat, target, "p-eagle")


def _load_eagle3(fields: Fields, stored: list[Stored], target: ModelConfig, kind: str = "eagle3") -> DrafterCheckpoint:
    folder = fields.file.parent
    config = drafter_config(fields, kind, target)
    tensors = check_layout(by_name(stored, _eagle3_name), folder, *drafter_layout(config))
    if "t2d" in tensors and "d2t" not in tensors:
        raise InputError(f"d2t in {folder}", "missing", "a table of offsets, as there is a t2d")
    tensors |= _vocabulary(tensors, folder, target.vocab_size) if "d2t" in tensors else {}
    return DrafterCheckpoint(config, tensors)


def _load_mtp(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    config, named = read_mtp(fields, stored, target)
    named = gather_experts(named, config.model, "modules")
    return DrafterCheckpoint(config, check_layout(named, fields.file.parent, *drafter_layout(config)))


def _load_frozen_kv(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    config, named = read_frozen_kv(fields, stored, target)
    return DrafterCheckpoint(config, check_layout(named, fields.file.parent, *drafter_layout(config)))


def _load_block(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    kind = drafter_kind(fields, [entry.key for entry in stored])
    config, named = read_block(fields, kind, stored, target)
    folder = fields.file.parent
    tensors = check_layout(named, folder, *drafter_layout(config))
    tensors |= _vocabulary(tensors, folder, target.vocab_size) if "d2t" in tensors else {}
    return DrafterCheckpoint(config, tensors)


def _load_standalone(fields: Fields, stored: list[Stored], target: ModelConfig) -> DrafterCheckpoint:
    model = _load_model(model_config(fields), fields.file.parent, stored, num_modules_of(fields))
    config = StandaloneConfig(model.config, model.config.vocab_size, target.hidden_size)
    return DrafterCheckpoint(config, model.tensors)


_LOADERS = {
    **dict.fromkeys(BLOCK_KINDS, _load_block),
    "eagle": _load_eagle,
    "eagle3": _load_eagle3,
    "p-eagle": _load_p_eagle,
    "mtp": _load_mtp,
    "frozen-kv": _load_frozen_kv,
    "standalone": _load_standalone,
}


def local_folder(field: str, path_or_hub: str | Path) -> Path | None:
    """Find a local checkpoint, None for a hub id.

    Raises InputError for what is neither.
    """
    or_hub = "or a hub id such as meta-llama/Llama-3.1-8B-Instruct"
    require(path_or_hub != "", field, path_or_hub, f"the path of a folder, {or_hub}")
    try:
        folder = Path(path_or_hub).expanduser()
        if folder.is_dir():
            return folder
        exists = folder.exists()
    except (TypeError, RuntimeError, OSError, ValueError) as error:
        raise InputError(field, path_or_hub, f"the path of a folder, {or_hub}") from error
    if exists:
        raise InputError(field, str(path_or_hub), f"a folder and not a file, {or_hub}")
    if not re.fullmatch(_HUB_ID, str(path_or_hub)):
        raise InputError(field, str(path_or_hub), f"an existing folder, {or_hub}")
    return None


def locate(field: str, path_or_hub: str | Path) -> Path:
    """Find the folder of a checkpoint, local or a snapshot of a hub repository that is downloaded once."""
    if folder := local_folder(field, path_or_hub):
        return folder
    from huggingface_hub import snapshot_download

    try:
        snapshot = Path(snapshot_download(str(path_or_hub), allow_patterns=[*_HUB_TEXT, "model*.safetensors"]))
        if not any(snapshot.glob("model*.safetensors")):
            snapshot_download(str(path_or_hub), allow_patterns=["pytorch_model*.bin"])
    except Exception as error:  # errors of hub, network and cache share no class
        allowed = f"an existing folder, or a hub id that can be reached or is in the cache ({type(error).__name__})"
        raise InputError(field, str(path_or_hub), allowed) from error
    return snapshot


def _target_name(key: str) -> str:
    return key if key.startswith(("model.", "lm_head.")) else f"model.{key}"


def _eagle3_name(key: str) -> str:
    name = key.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _vocabulary(tensors: Mapping[str, torch.Tensor], folder: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    """Convert d2t to i64 and t2d to bool, and check that they are inverse.

    t2d is made where the files have only d2t. Target ids ascend with draft ids, so that ties and sums over a
    distribution are the same in either numbering.
    """
    d2t = tensors["d2t"].long()
    target_ids = d2t + torch.arange(len(d2t))
    outside = ((target_ids < 0) | (target_ids >= vocab_size)).nonzero().flatten().tolist()
    if outside:
        allowed = f"an offset to a target id of 0 to {vocab_size - 1}"
        raise InputError(f"d2t[{outside[0]}] in {folder}", int(d2t[outside[0]]), allowed)
    falling = (target_ids.diff() <= 0).nonzero().flatten().tolist()
    if falling:
        before = int(target_ids[falling[0]])
        place = falling[0] + 1
        allowed = f"an offset to a target id above {before}, that of draft id {place - 1}"
        raise InputError(f"d2t[{place}] in {folder}", int(d2t[place]), allowed)
    t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, target_ids, True)
    differing = (tensors.get("t2d", t2d).bool() != t2d).nonzero().flatten().tolist()
    if differing:
        allowed = f"{t2d[differing[0]].item()}, as d2t has it"
        raise InputError(f"t2d[{differing[0]}] in {folder}", not t2d[differing[0]].item(), allowed)
    return {"d2t": d2t, "t2d": t2d}
