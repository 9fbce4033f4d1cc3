"""Heads written in another layout, and read back before the folder is there; copies of targets."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from shutil import copytree, rmtree
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from specsim.core.drafter import DrafterConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.pair import DrafterCheckpoint
from specsim.models.checkpoint.drafter_format import HeadWriter, drafter_formats, format_of
from specsim.models.checkpoint.fields import read_json
from specsim.models.checkpoint.loading import load_drafter, local_folder, locate
from specsim.models.checkpoint.model_config import read_target_config
from specsim.models.load import SHIPPED
from specsim.models.shipped import TINY


@dataclass(frozen=True, slots=True)
class Converted:
    """A head in its new folder."""

    folder: Path
    layout: str
    config: DrafterConfig
    num_tensors: int
    num_parameters: int


def convert(
    target: str | Path,
    draft: str | Path,
    folder: Path,
    layout: str,
    draft_fields: dict[str, object] | None = None,
) -> Converted:
    """Write a head in another layout of its format.

    target: folder or hub id, only its config.json is read. The new folder must not exist. It is there only if what was
    written reads back as the same config and the same tensors, bit for bit.
    """
    require_choice("layout", layout, _layouts())
    target_folder = target_folder_of(target)
    model = read_target_config(target_folder)
    head = load_drafter(draft, model, draft_fields)
    fields = head_fields(head.config, layout)
    if layout == "speculators":
        fields["dtype"] = str(head.tensors["fc.weight"].dtype).removeprefix("torch.")
        fields["speculators_config"]["verifier"] = _verifier(target, target_folder)
    with _new_folder(folder) as part:
        part.mkdir()
        (part / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        named = head_tensors(head, layout)
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in named.items()}
        save_file(copies, part / "model.safetensors", metadata={"format": "pt"})
        _require_same(head, load_drafter(part, model), layout)
    parameters = sum(tensor.numel() for tensor in head.tensors.values() if tensor.is_floating_point())
    return Converted(folder, layout, head.config, len(head.tensors), parameters)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Give the name of a part that becomes the folder at the end, or nothing if an error ends it."""
    require(not folder.exists(), "to", str(folder), "a folder that does not exist yet")
    require(folder.absolute().parent.is_dir(), "to", str(folder), "a new folder in a folder that exists")
    part = folder.with_name(f".{folder.name}-{token_hex(8)}")
    try:
        yield part
        part.rename(folder)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError("to", str(folder), f"a folder that can be written ({reason})") from error
    finally:
        rmtree(part, ignore_errors=True)


def copy_target(target: str | Path, folder: Path) -> None:
    """Copy a target's config, weights and tokenizer to a new folder; `tiny` is the shipped one."""
    source = target_folder_of(target)
    read_target_config(source)
    with _new_folder(folder) as part:
        copytree(source, part)


def target_folder_of(target: str | Path) -> Path:
    """Find the folder of a target, the shipped one by its name."""
    return TINY / "target" if target == SHIPPED else locate("target", target)


def head_fields(config: DrafterConfig, layout: str) -> dict[str, Any]:
    """Make the config.json of a head."""
    require_choice("layout", layout, _layouts())
    writer = _writer(config)
    require(layout in writer.layouts, "layout", layout, f"{' or '.join(writer.layouts)} for {config.kind}")
    return writer.config_json(config, layout)


def head_tensors(checkpoint: DrafterCheckpoint, layout: str) -> dict[str, torch.Tensor]:
    """Name and shape the tensors of a head as a layout does; no number is changed."""
    return dict(_writer(checkpoint.config).tensors(checkpoint.tensors, layout))


def _verifier(target: str | Path, folder: Path) -> dict[str, Any]:
    """Name a target as readers of the speculators layout look for it: a hub id, or a folder's absolute path."""
    is_local = target == SHIPPED or local_folder("target", target) is not None
    return {
        "name_or_path": str(folder.absolute() if is_local else target),
        "architectures": read_json(folder / "config.json").get("architectures", []),
    }


def _writer(config: DrafterConfig) -> HeadWriter:
    """Find the writer of a head's format, or raise InputError where it has none."""
    writer = format_of(config.kind).writer
    if writer is None:
        kinds = [kind for kind, drafter_format in drafter_formats().items() if drafter_format.writer]
        allowed = f"a drafter of kind {', '.join(kinds)}: no other has two layouts, engines read it as published or not"
        raise InputError("draft", config.kind, allowed)
    return writer


def _layouts() -> tuple[str, ...]:
    writers = [drafter_format.writer for drafter_format in drafter_formats().values() if drafter_format.writer]
    return tuple(dict.fromkeys(layout for writer in writers for layout in writer.layouts))


def _require_same(head: DrafterCheckpoint, read: DrafterCheckpoint, layout: str) -> None:
    """Raise InputError where the layout lost something of the head."""
    require(read.config == head.config, "layout", layout, "one that keeps every field of this head's config")
    is_same = read.tensors.keys() == head.tensors.keys() and all(
        tensor.dtype == read.tensors[name].dtype and torch.equal(tensor, read.tensors[name])
        for name, tensor in head.tensors.items()
    )
    require(is_same, "layout", layout, "one that keeps every tensor of this head")
