"""Tensors of a folder: safetensors or pickle, one file or indexed shards, checked key by key against a layout."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from specsim.core.errors import InputError, require
from specsim.core.rank_part import RankPart, Span
from specsim.models.checkpoint.fields import read_json
from specsim.models.checkpoint.layout import Layout

_FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TABLE_DTYPES = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool, torch.uint8)}
# Tables that old versions saved and nobody reads, and copies of the target's head from speculators' training.
_HARMLESS = (
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
)
# Copies of embedding and head that drafting modules in their target's folder have.
COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


class Stored(NamedTuple):
    """A tensor with its file and its key there."""

    tensor: torch.Tensor
    file: Path
    key: str
    whole_shape: tuple[int, ...] | None = None  # shape of the whole where the tensor is one rank's slice of it

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape) if self.whole_shape is None else self.whole_shape


class Slices(NamedTuple):
    """Slices of a model that a rank reads, and the endings of the keys that are divided by tokens."""

    part: RankPart
    tables: tuple[str, ...]
    family: str = "llama"  # of the model, as families store experts in different ways

    def span(self, key: str, shape: tuple[int, ...]) -> Span | None:
        """Find the slice of a stored tensor, None where it is whole."""
        if not shape:
            return None
        if is_stacked(key):
            return stacked_span(self.part, key, shape, self.family)
        copied = next((name for copy, name in COPIES.items() if key.endswith(copy)), None)
        table = copied if copied in self.tables else next((name for name in self.tables if key.endswith(name)), None)
        return self.part.span(key if table is None else table, shape, self.tables)


def read_weights(folder: Path, slices: Slices | None = None) -> list[Stored]:
    """Read every tensor of a folder as stored, in the first of the four formats that is there.

    slices: of each tensor only the rank's slice is read.
    """
    form = next((folder / name for name in _FORMS if (folder / name).exists()), None)
    if form is None:
        raise InputError(f"the weights in {folder}", "missing", " or ".join(_FORMS))
    return _read_shards(form, slices) if form.suffix == ".json" else _read_file(form, slices)


def by_name(stored: Iterable[Stored], rename: Callable[[str], str]) -> dict[str, Stored]:
    """Map canonical names to tensors, without known tensors that nobody reads."""
    named: dict[str, Stored] = {}
    for entry in stored:
        name = rename(entry.key)
        if name in named:
            same = f"the same tensor as {named[name].key} in {named[name].file.name}"
            raise InputError(f"{entry.key} in {entry.file}", same, "one tensor of that name")
        if not name.endswith(_HARMLESS):
            named[name] = entry
    return named


def check_layout(
    named: Mapping[str, Stored], folder: Path, required: Layout, optional: Layout
) -> dict[str, torch.Tensor]:
    """Check that tensors match the layout: none missing, none unexpected, every shape right."""
    for name, shape in required.items():
        require(name in named, f"{name} in {folder}", "missing", f"a tensor of shape {list(shape)}")
    layout = optional | required
    for name, entry in named.items():
        require(name in layout, f"{entry.key} in {entry.file}", "unexpected", "the tensors that config.json describes")
        _check_tensor(entry, layout[name], _TABLE_DTYPES.get(name, _DTYPES))
    return {name: entry.tensor for name, entry in named.items()}


def _check_tensor(entry: Stored, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    where = f"{entry.key} in {entry.file}"
    require(entry.shape == shape, f"the shape of {where}", list(entry.shape), str(list(shape)))
    if entry.tensor.dtype not in dtypes:
        raise InputError(f"the dtype of {where}", str(entry.tensor.dtype), " or ".join(map(str, dtypes)))
    if entry.tensor.is_floating_point() and not bool(entry.tensor.isfinite().all()):
        raise InputError(where, "not finite everywhere", "finite values")


def _read_shards(index: Path, slices: Slices | None) -> list[Stored]:
    weight_map = read_json(index).mapping("weight_map").values
    require(weight_map, f"weight_map in {index}", weight_map, "an object of file names by key")
    stored: list[Stored] = []
    for name in sorted(set(map(str, weight_map.values()))):
        require(Path(name).name == name, f"weight_map in {index}", name, "names of files in the same folder")
        stored += _read_file(index.parent / name, slices)
    stored_keys = {(entry.key, entry.file.name) for entry in stored}
    for key, name in weight_map.items():
        if (key, name) not in stored_keys:
            raise InputError(f"{key} in {index.parent / name}", "missing", f"a tensor, as {index.name} says")
    return stored


def _read_file(file: Path, slices: Slices | None) -> list[Stored]:
    require(file.is_file(), str(file), "missing", "a file that can be read")
    require(os.access(file, os.R_OK), str(file), "unreadable", "a file that this user may read")
    if slices is not None:
        return _read_slices(file, slices)
    tensors = _read_safetensors(file) if file.suffix == ".safetensors" else _read_pickle(file)
    return [Stored(tensor, file, key) for key, tensor in tensors.items()]


def _read_slices(file: Path, slices: Slices) -> list[Stored]:
    """Read a rank's slices of the tensors of a file, each by itself."""
    allowed = "safetensors with tensor_parallel, as no slices are read from other formats"
    require(file.suffix == ".safetensors", str(file), "a pickle", allowed)
    stored: list[Stored] = []
    try:
        with safe_open(file, "pt") as content:
            for key in content.keys():  # noqa: SIM118 - not a mapping
                tensor_slice = content.get_slice(key)
                shape = tuple(tensor_slice.get_shape())
                span = slices.span(key, shape)
                stored.append(Stored(_cut(tensor_slice, span), file, key, shape))
    except (SafetensorError, OSError) as error:
        raise InputError(str(file), f"damaged or cut short: {error}", "a complete safetensors file") from error
    return stored


def _cut(content: Any, span: Span | None) -> torch.Tensor:
    """Read a slice into memory of its own."""
    if span is None:
        return content[:]
    before = (slice(None),) * span.dim
    step = content.get_shape()[span.dim] // span.parts
    places = range(0, span.parts * step, step) if step else (0,)
    cuts = [content[(*before, slice(first + span.start, first + span.stop))] for first in places]
    cut = cuts[0] if len(cuts) == 1 else torch.cat(cuts, span.dim)
    return cut.clone() if cut.untyped_storage().nbytes() > cut.nbytes else cut


def _read_safetensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise InputError(str(file), f"damaged or cut short: {error}", "a complete safetensors file") from error


def _read_pickle(file: Path) -> dict[str, torch.Tensor]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        allowed = "a file that torch.load reads with weights_only=True"
        raise InputError(str(file), "a pickle of more than tensors", allowed) from error
    except Exception as error:  # the restricted unpickler raises almost anything for damaged bytes
        reason = " ".join(str(error).split(".")[0].split()) or type(error).__name__
        raise InputError(str(file), f"damaged or cut short: {reason}", "a complete PyTorch file") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(key, str) and _is_dense(value) for key, value in tensors.items()
    ):
        raise InputError(str(file), "a pickle of something else", "a state dict of tensors by key")
    return tensors


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_meta


_STACKED = r"(?:.*\.)?experts\.(gate_up|down)_proj(?:_(bias|blocks|scales))?"


def is_stacked(key: str) -> bool:
    """Check whether a key names a tensor of all experts of a layer."""
    return re.fullmatch(_STACKED, key) is not None


def stacked_span(part: RankPart, key: str, shape: tuple[int, ...], family: str) -> Span | None:
    """Find a rank's slice of such a tensor.

    GPT-OSS has its matrices transposed where they are not in MXFP4, and gate and up in alternate columns.
    """
    match = re.fullmatch(_STACKED, key)
    assert match, key
    projection, kind = match.groups()
    is_transposed = family == "gpt_oss" and kind is None
    if projection == "gate_up":
        return part.divided(key, shape, 2 if is_transposed else 1, parts=1 if family == "gpt_oss" else 2)
    if kind == "bias":
        return part.of_rank_0(shape)
    return part.divided(key, shape, 1 if is_transposed else 2)
