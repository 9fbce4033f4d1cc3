"""Keys and values of one model, by slot."""

from copy import deepcopy
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of one model's KV, keys and values alike."""

    num_layers: int
    num_kv_heads: int
    head_dim: int


class KVBuffer:
    """Keys and values of one model, [layers, slots, KV heads, D] each."""

    @torch.inference_mode(False)  # such a tensor may be written inside that mode and outside
    def __init__(
        self, layout: KVLayout, num_slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        shape = (layout.num_layers, num_slots, layout.num_kv_heads, layout.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
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
        """Write rows to their slots, without those of slot -1."""
        kept = slots_R >= 0
        self.keys[layer, slots_R[kept]] = key_RAD[kept]
        self.values[layer, slots_R[kept]] = value_RAD[kept]

    def move(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copy slots `source` to slots `destination` in every layer, reading all before writing any."""
        self.keys[:, destination] = self.keys[:, source]
        self.values[:, destination] = self.values[:, source]

    def copy_(self, source: "KVBuffer") -> None:
        """Copy another buffer's content, from any device and dtype, but not its snapshot."""
        self.keys.copy_(source.keys)
        self.values.copy_(source.values)
