"""The target's features of each request's last positions, which both engines keep in the pool for some drafters."""

from typing import Self

import torch


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
        found = []
        for position in range(column - 1, max(column - count, 0) - 1, -1):
            if int(self.positions[row, position % width]) != position:
                break
            found.insert(0, self.features[row, position % width])
        return torch.stack(found) if found else self.features.new_empty(0, self.features.shape[2])

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
