"""Roofline bounds: unavoidable bytes and operations, and their time at the measured peaks."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.drafter import DrafterConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.drafter_format import drafter_layout
from specsim.models.checkpoint.layout import target_layout

BF16 = 2  # bytes
_KV = ("keys", "values")


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured peaks of one run."""

    read: float  # memory reads, in bytes per second
    copy: float  # bytes/s, read and written
    dense: float  # bf16 operations/s


UNMEASURED = Peaks(math.nan, math.nan, math.nan)  # without a GPU


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """Bytes of one tensor, or of `count` tensors whose names differ in a layer's number, written *."""

    tensor: str  # name of the tensor; * stands for the number of a layer
    bytes: int  # bytes of all of them
    count: int = 1  # number of such tensors


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """Bytes to read (or to write, where named so) and operations; a product and a sum are two."""

    parts: tuple[TensorBytes, ...]  # bytes by tensor
    operations: int = 0  # arithmetic operations; a product and a sum are two

    @property
    def bytes(self) -> int:
        """Bytes to move."""
        return sum(part.bytes for part in self.parts)

    def read_us(self, peaks: Peaks) -> float:
        """Compute the microseconds of the bytes."""
        return 1e6 * self.bytes / peaks.read

    def compute_us(self, peaks: Peaks) -> float:
        """Compute the microseconds of the operations."""
        return 1e6 * self.operations / peaks.dense

    def us(self, peaks: Peaks) -> float:
        """Compute the larger of both times, in microseconds."""
        return max(self.read_us(peaks), self.compute_us(peaks))

    def __add__(self, other: "RooflineBound") -> "RooflineBound":
        return RooflineBound(_grouped((*self.parts, *other.parts)), self.operations + other.operations)

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        parts = [{"tensor": part.tensor, "count": part.count, "bytes": part.bytes} for part in self.parts]
        return {"bytes": self.bytes, "operations": self.operations, "parts": parts}


def _grouped(parts: Iterable[TensorBytes]) -> tuple[TensorBytes, ...]:
    """Merge parts whose names differ only in the number of a layer."""
    groups: dict[str, TensorBytes] = {}
    for part in parts:
        name = re.sub(r"\.\d+\.", ".*.", part.tensor)
        before = groups.get(name, TensorBytes(name, 0, 0))
        groups[name] = TensorBytes(name, before.bytes + part.bytes, before.count + part.count)
    return tuple(groups.values())


def _weights(layout: Mapping[str, tuple[int, ...]], rows: int, itemsize: int, prefix: str = "") -> RooflineBound:
    """Bound products of `rows` rows with all weights: each tensor is read once, an embedding row by row."""
    parts = []
    operations = 0
    for name, shape in layout.items():
        numbers = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if name.endswith("embed_tokens.weight"):
            numbers = min(rows, shape[0]) * shape[1]
        elif len(shape) == 2:
            operations += 2 * rows * numbers
        parts.append(TensorBytes(prefix + name, numbers * itemsize))
    return RooflineBound(_grouped(parts), operations)


def _kv(name: str, model: ModelConfig, requests: int, rows: int, seq_len: int, itemsize: int) -> RooflineBound:
    """Bound attention over the keys and values of all committed columns, for `rows` rows of each request."""
    numbers = model.num_layers * requests * seq_len * model.num_kv_heads * model.head_dim
    parts = tuple(TensorBytes(f"{name} KV of layer *, {which}", numbers * itemsize, model.num_layers) for which in _KV)
    return RooflineBound(parts, 4 * model.num_layers * requests * rows * seq_len * model.num_heads * model.head_dim)


def forward_bound(model: ModelConfig, requests: int, rows: int, seq_len: int, itemsize: int = BF16) -> RooflineBound:
    """Bound one forward of the target over `rows` rows of every request.

    All weights are read once, and the KV of seq_len columns of each request.
    """
    weights = _weights(target_layout(model), requests * rows, itemsize)
    return weights + _kv("target", model, requests, rows, seq_len, itemsize)


def prefill_bound(model: ModelConfig, tokens: int, itemsize: int = BF16) -> RooflineBound:
    """Bound a prompt's forward: products of all tokens but with the head, of the last one's; causal attention."""
    layout = dict(target_layout(model))
    head = {name: layout.pop(name) for name in ("lm_head.weight",) if name in layout}
    pairs = tokens * (tokens + 1) // 2
    attention = RooflineBound((), 4 * model.num_layers * model.num_heads * model.head_dim * pairs)
    return _weights(layout, tokens, itemsize) + _weights(head, 1, itemsize) + attention


def _draft_forward(
    drafter: DrafterConfig, target: ModelConfig, requests: int, rows: int, head_rows: int, seq_len: int, fuses: bool
) -> RooflineBound:  # fmt: skip
    """Bound one forward of an EAGLE head over `rows` rows of every request.

    Its vocabulary is read for `head_rows` of them.
    """
    layout = {
        name: shape
        for name, shape in drafter_layout(drafter)[0].items()
        if name != "d2t" and (fuses or drafter.kind != "eagle3" or name != "fc.weight")
    }
    head = {name: layout.pop(name) for name in ["lm_head.weight"] if name in layout}
    table = (target.vocab_size, target.hidden_size)
    if not head:  # EAGLE-1 and EAGLE-2 read the target's
        head = {"target lm_head.weight": table}
    if "embed_tokens.weight" not in layout:
        layout["target embed_tokens.weight"] = table
    return (
        _weights(layout, requests * rows, BF16, "drafter ")
        + _weights(head, requests * head_rows, BF16, "drafter ")
        + _kv("drafter", drafter.model, requests, rows, seq_len, BF16)
    )


def round_bound(
    model: ModelConfig, drafter: DrafterConfig | None, config: SpecConfig, requests: int, seq_len: int
) -> RooflineBound:
    """Bound a whole round in bf16.

    It has the verify forward, and the drafter's weights and KV once per forward: num_steps - 1 steps of topk lanes and
    one draft-extend of num_steps + 1 rows. Only draft-extend reads EAGLE-3's fc. No tensor is assumed to stay in a
    cache between forwards.
    """
    bound = forward_bound(model, requests, config.num_draft_tokens, seq_len)
    if config.is_plain or drafter is None:
        return bound
    lanes = config.topk
    extended = config.num_steps + 1
    for _ in range(config.num_steps - 1):
        bound += _draft_forward(drafter, model, requests, lanes, lanes, seq_len, False)
    return bound + _draft_forward(drafter, model, requests, extended, 1, seq_len, True)
