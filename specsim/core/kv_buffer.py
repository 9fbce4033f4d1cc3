"""Keys and values of one model, by slot."""

from copy import deepcopy
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one model's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # of a key
    value_dim: int | None = None  # of a value; None: as of a key
    values_in_keys: bool = False  # a value is its key's first channels, and has no memory of its own


class KVBuffer:
    """Keys and values of one model, [layers, slots, KV heads, D] each.

    Values may be a view of the keys.
    """

    @torch.inference_mode(False)  # such a tensor may be written inside that mode and outside
    def __init__(
        self, layout: KVLayout, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape = (layout.num_layers, num_slots, layout.num_kv_heads, layout.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        value_dim = layout.head_dim if layout.value_dim is None else layout.value_dim
        self.values_in_keys = layout.values_in_keys
        if layout.values_in_keys:
            self.values = self.keys[..., :value_dim]
        else:
            self.values = torch.empty((*shape[:-1], value_dim), dtype=dtype, device=device)
        self.snapshot: KVBuffer | None = None  # content at the last `take_snapshot`, where `keep_snapshot` wants one

    @torch.inference_mode(False)
    def keep_snapshot(self) -> None:
        """Allocate the snapshot, before a graph of `take_snapshot` is captured."""
        self.snapshot = deepcopy(self)

    def take_snapshot(self) -> None:
        """Copy the content to the snapshot, if one is kept."""
        if self.snapshot is not None:
            self.snapshot.copy_(self)

    def write(self, layer: int, slots_R: torch.Tensor, key_RAD: torch.Tensor, value_RAD: torch.Tensor) -> None:
        """Write rows to their slots, without those of slot -1.

        Where values are in the keys, only keys are written.
        """
        kept = slots_R >= 0
        self.keys[layer, slots_R[kept]] = key_RAD[kept]
        if not self.values_in_keys:
            self.values[layer, slots_R[kept]] = value_RAD[kept]

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` to slots `destination` in every layer, reading all before writing any."""
        self.keys[:, destination] = self.keys[:, source]
        if not self.values_in_keys:
            self.values[:, destination] = self.values[:, source]

    def copy_(self, source: "KVBuffer") -> None:
        """Copy another buffer's content, from any device and dtype, but not its snapshot."""
        self.keys.copy_(source.keys)
        if not self.values_in_keys:
            self.values.copy_(source.values)
