"""Targets and drafters with weights, from a local folder or the Hugging Face hub."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint, TargetCheckpoint
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_kind, format_of
from specsim.models.checkpoint.fields import read_json
from specsim.models.checkpoint.language_model import load_language_model, num_modules_of
from specsim.models.checkpoint.model_config import language_fields, read_target_config
from specsim.models.checkpoint.weights import Stored, read_weights

_HUB_ID = r"[\w-][\w.-]*/[\w-][\w.-]*"
_HUB_TEXT = ("*.json", "*.txt", "tokenizer.model")


Read = Callable[[Path], list[Stored]]


def load_target(path_or_hub: str | Path, read: Read = read_weights) -> TargetCheckpoint:
    """Load a target of a supported family, without the drafting modules in its folder.

    read: gives the tensors of a folder. Raises InputError with file and key for a missing, extra or misshapen tensor.
    """
    folder = locate("target", path_or_hub)
    config = read_target_config(folder)
    fields = read_json(folder / "config.json")
    stored = read(folder)
    if "text_config" in fields.values and fields.values.get("tie_word_embeddings") is None:
        has_head = any(entry.key.endswith("lm_head.weight") for entry in stored)  # transformers ties a missing one
        config = replace(config, tie_word_embeddings=config.tie_word_embeddings or not has_head)
    return load_language_model(config, folder, stored, num_modules_of(language_fields(fields)))


def load_drafter(
    path_or_hub: str | Path,
    target_config: ModelConfig,
    draft_fields: Mapping[str, Any] | None = None,
    kind: str | None = None,
    read: Read = read_weights,
) -> DrafterCheckpoint:
    """Load a drafter with weights, of the kind that its files show.

    draft_fields: replacements for fields of its config.json. kind: one whose modules are in the folder of a language
    model. read: gives the tensors of a folder. Raises InputError as load_target does, and where the drafter does not
    fit its target.
    """
    folder = locate("draft", path_or_hub)
    fields = read_json(folder / "config.json").replaced(draft_fields or {})
    stored = read(folder)
    file_kind = drafter_kind(fields, [entry.key for entry in stored], kind)
    checkpoint = format_of(file_kind).load(fields, stored, target_config)
    for name in draft_fields or ():
        allowed = f"a field of an {file_kind} config: {', '.join(sorted(fields.read_names))}"
        require(name in fields.read_names, "draft_fields", name, allowed)
    return checkpoint


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
