"""Parts of ranks, gathered in the order of the ranks, eagerly and in a graph."""

import torch

from specsim.core.rank_group import RankGroup
from specsim.fast.runtime.launch import recorder
from specsim.fast.runtime.peer_memory import LinkedRanks


def gather(ranks: RankGroup, part: torch.Tensor) -> torch.Tensor:
    """Gather parts of one shape, [ranks, ...], also in a graph that is recorded."""
    part = part.contiguous()
    out = part.new_empty(ranks.size, *part.shape)
    record = recorder.get()
    if isinstance(ranks, LinkedRanks) and ranks.links(part):
        ranks.peers.gather(part, out)
    elif record is None:
        ranks.gather(part, out)
    else:
        record("gather over ranks", lambda: ranks.gather(part, out))
    return out


def without_padding(ranks: RankGroup, part_RC: torch.Tensor, size: int) -> torch.Tensor:
    """Set the entries of a slice beyond the row's size to -inf, in place."""
    own = len(ranks.part.tokens(size))
    if own < part_RC.shape[1]:
        part_RC[:, own:].fill_(float("-inf"))
    return part_RC


def join_slices(ranks: RankGroup, part_RC: torch.Tensor, size: int) -> torch.Tensor:
    """Join slices of rows in the order of the ranks, [R, size].

    The last slices may be longer than needed.
    """
    parts = gather(ranks, part_RC)
    num_rows, chunk = part_RC.shape
    joined = part_RC.new_empty(num_rows, size)
    for rank in range(ranks.size):
        start = rank * chunk
        width = min(chunk, size - start)
        if width > 0:
            joined[:, start : start + width].copy_(parts[rank, :, :width])
    return joined
