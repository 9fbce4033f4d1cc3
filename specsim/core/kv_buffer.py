"""Tensors of a pool: keys and values and side outputs by slot, and the target's last features by request."""

from collections.abc import Mapping
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Literal, Self

import torch

from specsim.core.errors import require, require_choice, require_number

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max
KVDtype = Literal["model", "fp8_e4m3"]
KV_DTYPES: tuple[KVDtype, ...] = ("model", "fp8_e4m3")


@dataclass(frozen=True, slots=True)
class KVFormat:
    """Number format of one pool's KV.

    In fp8_e4m3 a number x is stored as x / scale, rounded to four bits of precision once, when it is written.
    """

    dtype: KVDtype = "model"  # the model's own type
    key_scale: float = 1.0  # of fp8_e4m3
    value_scale: float = 1.0  # of fp8_e4m3; values that are in the keys have the keys'

    def __post_init__(self) -> None:
        require_choice("kv_dtype", self.dtype, KV_DTYPES)
        for name in ("key_scale", "value_scale"):
            scale = getattr(self, name)
            require_number(name, scale, 1e-6, 1e6, "a number from 0.000001 to 1000000")
            require(self.dtype != "model" or scale == 1, name, scale, "1 unless kv_dtype is fp8_e4m3")


PLAIN = KVFormat()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one model's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # of a key
    value_dim: int | None = None  # of a value; None: as of a key
    values_in_keys: bool = False  # a value is its key's first channels, and has no memory of its own
    first_head: int = 0  # of these heads among the model's, where ranks share them


class KVBuffer:
    """Keys and values of one model, [layers, slots, KV heads, D] each, as they are stored.

    Values may be a view of the keys.
    """

    @torch.inference_mode(False)  # such a tensor may be written inside that mode and outside
    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        stored_as: KVFormat = PLAIN,
    ) -> None:
        dtype = FP8 if stored_as.dtype == "fp8_e4m3" else dtype
        shape = (layout.num_layers, num_slots, layout.num_kv_heads, layout.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        value_dim = layout.head_dim if layout.value_dim is None else layout.value_dim
        self.values_in_keys = layout.values_in_keys
        self.first_head = layout.first_head
        if layout.values_in_keys:
            self.values = self.keys[..., :value_dim]
        else:
            self.values = torch.empty((*shape[:-1], value_dim), dtype=dtype, device=device)
        self.key_scale = stored_as.key_scale
        self.value_scale = stored_as.key_scale if layout.values_in_keys else stored_as.value_scale
        self.snapshot: KVBuffer | None = None  # content at the last `take_snapshot` of the pools, None unless kept

    @property
    def is_fp8(self) -> bool:
        """Check whether the KV is stored in fp8_e4m3."""
        return self.keys.dtype == FP8

    @torch.inference_mode(False)
    def keep_snapshot(self) -> None:
        """Allocate the snapshot, before a graph of `take_snapshot` is captured."""
        self.snapshot = deepcopy(self)

    def write(self, layer: int, slots_R: torch.Tensor, key_RAD: torch.Tensor, value_RAD: torch.Tensor) -> None:
        """Write rows to their slots, without those of slot -1.

        Where values are in the keys, only keys are written.
        """
        has_slot = slots_R >= 0
        self.keys[layer, slots_R[has_slot]] = self._stored(key_RAD[has_slot], self.key_scale)
        if not self.values_in_keys:
            self.values[layer, slots_R[has_slot]] = self._stored(value_RAD[has_slot], self.value_scale)

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Read keys and values of these slots, [slots, KV heads, D] each, in that type."""
        keys = self.keys[layer, slots].to(dtype)
        values = self.values[layer, slots].to(dtype)
        return (keys * self.key_scale, values * self.value_scale) if self.is_fp8 else (keys, values)

    def _stored(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        if not self.is_fp8:
            return x
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide / scale).clamp(-_LARGEST, _LARGEST).to(FP8)

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` to slots `destination` in every layer, reading all before writing any."""
        self.keys[:, destination] = self.keys[:, source]
        if not self.values_in_keys:
            self.values[:, destination] = self.values[:, source]

    def with_heads_of(self, other: "KVBuffer") -> "KVBuffer":
        """View the heads that another buffer of the same model holds, which may be those of one rank."""
        count = other.keys.shape[2]
        if count == self.keys.shape[2]:
            return self
        view = copy(self)
        view.keys = self.keys.narrow(2, other.first_head, count)
        view.values = self.values.narrow(2, other.first_head, count)
        view.first_head = other.first_head
        return view

    def copy_(self, source: "KVBuffer") -> None:
        """Copy another buffer's content, from any device and dtype, but not its snapshot."""
        source = source.with_heads_of(self)
        self.keys.copy_(source.keys)
        if not self.values_in_keys:
            self.values.copy_(source.values)


class SideOutputs:
    """Rows of each side output (such as the experts of a row), [slots, ...] in int16.

    They are written with a row's KV and move with it, so that a committed column has those of its token: after a tree,
    a preemption, or on pages that another request filled.
    """

    @torch.inference_mode(False)  # such a tensor may be written inside that mode and outside
    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], num_slots: int, device: torch.device | str = "cpu"
    ) -> None:
        self.rows = {
            name: torch.full((num_slots, *shape), -1, dtype=torch.int16, device=device)
            for name, shape in shapes.items()
        }

    def write(self, slots_R: torch.Tensor, side: Mapping[str, torch.Tensor]) -> None:
        """Write rows to their slots, without those of slot -1."""
        has_slot = slots_R >= 0
        for name, rows in self.rows.items():
            rows[slots_R[has_slot]] = side[name][has_slot]

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` to slots `destination`, reading all before writing any."""
        for rows in self.rows.values():
            rows[destination] = rows[source]

    def read(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Copy the rows of slots to the host."""
        return {name: rows[slots].cpu() for name, rows in self.rows.items()}

    def copy_(self, source: "SideOutputs") -> None:
        """Copy the content of others of the same shapes, from any device."""
        for name, rows in self.rows.items():
            rows.copy_(source.rows[name])


class FeatureRing:
    """Features by request and position, of as many last positions as a drafter may need again.

    Position p is in entry p modulo W of its request's row. After a round a drafter needs `lookahead` positions before
    the new ones again. Rounds whose tokens are dropped, up to two with a lagging schedule, write further positions.
    """

    @torch.inference_mode(False)  # such a tensor may be written inside that mode and outside
    def __init__(
        self, num_requests: int, width: int, num_features: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.features = torch.zeros(num_requests, width, num_features, dtype=dtype, device=device)
        # i64 [requests, W], position whose features an entry holds, -1 for none
        self.positions = torch.full((num_requests, width), -1, dtype=torch.int64, device=device)

    @classmethod
    def make(
        cls,
        num_requests: int,
        lookahead: int,
        num_steps: int,
        num_features: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Self | None:
        """Make the ring of a drafter with this lookahead, None where it is 0."""
        width = lookahead + 2 * (num_steps + 1)
        return cls(num_requests, width, num_features, dtype, device) if lookahead else None

    def clear(self, row: int) -> None:
        """Forget a request's features."""
        self.positions[row] = -1

    def before(self, row: int, column: int, count: int) -> torch.Tensor:
        """Return the features of up to `count` positions before a column, in order, [up to count, F]."""
        width = self.positions.shape[1]
        features = []
        for position in range(column - 1, max(column - count, 0) - 1, -1):
            if int(self.positions[row, position % width]) != position:
                break
            features.insert(0, self.features[row, position % width])
        return torch.stack(features) if features else self.features.new_empty(0, self.features.shape[2])

    def write(self, row: int, column: int, features_RF: torch.Tensor) -> None:
        """Keep the features of the positions from a column on, the last W of them."""
        width = self.positions.shape[1]
        positions = (column + torch.arange(len(features_RF)))[-width:]
        self.features[row, positions % width] = features_RF[-width:]
        self.positions[row, positions % width] = positions

    def copy_(self, source: "FeatureRing") -> None:
        """Copy another ring's content, from any device and dtype."""
        self.features.copy_(source.features)
        self.positions.copy_(source.positions)
