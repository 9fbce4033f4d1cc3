"""Tensors that an engine dumped, by the reference's names: safetensors, SGLang's dumps and vLLM's hidden states."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from specsim.core.errors import InputError, require
from specsim.core.files import read_json
from specsim.correctness.parity.trace import Tokens

_ENDINGS = (".safetensors", ".pt")
_PHASES = ("target", "extend", "draft1")
_ALIASES = {"hidden_states": "target/features", "input_ids": "token_ids"}  # of vLLM's connector, and of both engines
_ALLOWED = "a file or folder of tensors: .safetensors, or .pt as SGLang's dumpers write them"


def read_dump(path: Path, map_file: Path | None = None) -> dict[str, torch.Tensor]:
    """Read all tensors of a file or a folder, renamed by a map and by the names of such dumps.

    A name that occurs again (in a later forward) ends in #2, #3, ... SGLang's `layer_id=3` of `name=x` makes
    `layers.3.x`.
    """
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in _ENDINGS)
    require(files and all(file.suffix in _ENDINGS for file in files), "engine", str(path), _ALLOWED)
    rename = _renaming(map_file)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(files, key=_order):
        for name, tensor in _read_file(file):
            count = sum(other.partition("#")[0] == name for other in tensors)
            tensors[f"{name}#{count + 1}" if count else name] = tensor
    return {rename(name): tensor for name, tensor in tensors.items()}


def _order(file: Path) -> tuple[int, str]:
    """Sort SGLang's files by the number of the dump."""
    match = re.search(r"dump_index=(\d+)", file.name)
    return (int(match[1]) if match else 0, str(file))


def _read_file(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        if file.suffix == ".safetensors":
            yield from load_file(file).items()
            return
        value = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, OSError, RuntimeError, EOFError) as error:
        reason = " ".join(str(error).split(".")[0].split())
        raise InputError("engine", str(file), f"{_ALLOWED} ({reason})") from error
    if isinstance(value, dict) and "value" in value and "meta" in value:
        yield from _named(_tagged_name(file), value["value"])
        return
    if not isinstance(value, dict):
        raise InputError("engine", str(file), _ALLOWED)
    for name, part in value.items():
        yield from _named(str(name), part)


def _tagged_name(file: Path) -> str:
    """Read the name and the layer of a tensor from the name of SGLang's file: step=1___rank=0___name=x___layer_id=3."""
    tags = dict(tag.split("=", 1) for tag in file.stem.split("___") if "=" in tag)
    require(tags.get("rank", "0") == "0", "engine", str(file), "tensors of rank 0 alone, whole ones of one GPU")
    name = tags.get("name", file.stem).removeprefix("non_intrusive__")
    return f"layers.{tags['layer_id']}.{name}" if "layer_id" in tags and "layers." not in name else name


def _named(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """List the tensors of a value, which may be several."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for index, part in enumerate(value):
            yield from _named(f"{name}.{index}", part)


def _renaming(file: Path | None) -> Any:
    """Make the function that renames by a JSON object of engine's names; * stands for a number in both."""
    allowed = 'a JSON object of names, such as {"model.layers.*.mlp": "target/model.layers.*.mlp.down_proj"}'
    rules = {} if file is None else read_json(file, "map", allowed)
    if not isinstance(rules, dict) or not all(isinstance(name, str) for name in rules.values()):
        raise InputError("map", str(file), allowed)
    forms = [(re.compile(re.escape(name).replace(r"\*", r"(\d+)")), new) for name, new in rules.items()]

    def rename(name: str) -> str:
        for form, new in forms:
            if match := form.fullmatch(name):
                for number in match.groups():
                    new = new.replace("*", number, 1)
                return new
        return _ALIASES.get(name, name)

    return rename


def tokens_of(tensors: Mapping[str, torch.Tensor]) -> Tokens:
    """Take the prompt's token ids, and the token after it where the dump has one, out of a dump."""
    ids = tensors.get("token_ids")
    if ids is None or ids.is_floating_point() or ids.numel() == 0:
        raise InputError("engine", "a dump without token_ids", "one with token_ids, i64 [R], of one prompt")
    next_token = tensors.get("next_token")
    next_id = None if next_token is None else int(next_token.flatten()[0])
    return Tokens(tuple(ids.flatten().tolist()), next_id)


def select(tensors: Mapping[str, torch.Tensor], names: Iterable[str], vocab_size: int) -> dict[str, torch.Tensor]:
    """Select the tensors that the reference has too, by its names.

    A name without a phase is that of the first phase with such a tensor. Draft logits over the target's vocabulary are
    target_logits.
    """
    names = set(names)
    selected: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        paths = [name, *(f"{phase}/{name}" for phase in _PHASES)]
        path = next((path for path in paths if path in names), None)
        over_target = "" if path is None else path.replace("lm_head", "target_logits")
        if over_target in names and tensor.shape[-1] == vocab_size:
            path = over_target
        if path is not None:
            selected.setdefault(path, tensor)
    return selected


def write_dump(tensors: Mapping[str, torch.Tensor], tokens: Tokens, next_token: int, file: Path) -> None:
    """Write a trace as an engine would dump it."""
    values = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    values |= {"token_ids": torch.tensor(tokens.ids), "next_token": torch.tensor([next_token])}
    save_file(values, file)
