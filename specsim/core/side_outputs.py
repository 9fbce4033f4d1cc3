"""Side outputs of the target by slot, which the pool keeps like the KV and serving delivers with the tokens."""

from collections.abc import Mapping

import torch


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
        kept = slots_R >= 0
        for name, rows in self.rows.items():
            rows[slots_R[kept]] = side[name][kept]

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
