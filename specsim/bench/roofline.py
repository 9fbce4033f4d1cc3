"""Roofline bounds: the bytes and operations that cannot be avoided, and their time at the measured peaks."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specsim.core.config import SpecConfig
from specsim.core.drafter import DrafterConfig
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.layout import drafter_layout, target_layout

BF16 = 2  # bytes
_KV = ("keys", "values")


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured peaks of this run: bytes a second read and copied (read and written), bf16 operations a second."""

    read: float
    copy: float
    dense: float


@dataclass(frozen=True, slots=True)
class Part:
    """Bytes of one tensor, or of `count` alike whose name has a * for what differs."""

    tensor: str
    bytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """Bytes to read (and, where listed so, to write) and operations. operations: a product and a sum are two."""

    parts: tuple[Part, ...]
    operations: int = 0

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    def read_us(self, peaks: Peaks) -> float:
        """Microseconds that the bytes take."""
        return 1e6 * self.bytes / peaks.read

    def compute_us(self, peaks: Peaks) -> float:
        """Microseconds that the operations take."""
        return 1e6 * self.operations / peaks.dense

    def us(self, peaks: Peaks) -> float:
        """Microseconds: the larger of both."""
        return max(self.read_us(peaks), self.compute_us(peaks))

    def __add__(self, other: "RooflineBound") -> "RooflineBound":
        return RooflineBound(_grouped((*self.parts, *other.parts)), self.operations + other.operations)

    def to_json(self) -> dict[str, Any]:
        """A value that json can write."""
        parts = [{"tensor": part.tensor, "count": part.count, "bytes": part.bytes} for part in self.parts]
        return {"bytes": self.bytes, "operations": self.operations, "parts": parts}


def _grouped(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts whose names differ in a number of a layer only, as one."""
    groups: dict[str, Part] = {}
    for part in parts:
        name = re.sub(r"\.\d+\.", ".*.", part.tensor)
        before = groups.get(name, Part(name, 0, 0))
        groups[name] = Part(name, before.bytes + part.bytes, before.count + part.count)
    return tuple(groups.values())


def _weights(layout: Mapping[str, tuple[int, ...]], rows: int, itemsize: int, prefix: str = "") -> RooflineBound:
    """Every tensor once, each matrix multiplied with so many rows; an embedding is read a row at a time."""
    parts = []
    operations = 0
    for name, shape in layout.items():
        numbers = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if name.endswith("embed_tokens.weight"):
            numbers = min(rows, shape[0]) * shape[1]
        elif len(shape) == 2:
            operations += 2 * rows * numbers
        parts.append(Part(prefix + name, numbers * itemsize))
    return RooflineBound(_grouped(parts), operations)


def _kv(name: str, model: ModelConfig, requests: int, rows: int, seq_len: int, itemsize: int) -> RooflineBound:
    """Keys and values of every committed column, read by so many rows of each request."""
    numbers = model.num_layers * requests * seq_len * model.num_kv_heads * model.head_dim
    parts = tuple(Part(f"{name} KV of layer *, {which}", numbers * itemsize, model.num_layers) for which in _KV)
    return RooflineBound(parts, 4 * model.num_layers * requests * rows * seq_len * model.num_heads * model.head_dim)


def forward_bound(model: ModelConfig, requests: int, rows: int, seq_len: int, itemsize: int = BF16) -> RooflineBound:
    """One forward of the target over `rows` rows of every request: all weights once, and the KV of seq_len columns."""
    weights = _weights(target_layout(model), requests * rows, itemsize)
    return weights + _kv("target", model, requests, rows, seq_len, itemsize)


def _draft_forward(
    drafter: DrafterConfig, target: ModelConfig, requests: int, rows: int, head_rows: int, seq_len: int, fuses: bool
) -> RooflineBound:  # fmt: skip
    """One forward of an EAGLE head over `rows` rows of every request, its vocabulary read for `head_rows` of them."""
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
    """A whole round in bf16: the verify forward, and the drafter's weights and KV once for each of its forwards.

    These are num_steps - 1 steps of topk lanes and one draft-extend of num_steps + 1 rows, which alone reads fc of
    EAGLE-3's features. No tensor is assumed to stay in a cache from one forward to the next.
    """
    bound = forward_bound(model, requests, config.num_draft_tokens, seq_len)
    if config.is_plain or drafter is None:
        return bound
    lanes = config.topk
    extended = config.num_steps + 1
    for _ in range(config.num_steps - 1):
        bound += _draft_forward(drafter, model, requests, lanes, lanes, seq_len, False)
    return bound + _draft_forward(drafter, model, requests, extended, 1, seq_len, True)
