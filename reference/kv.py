"""Where a round's KV lives: draft lanes, copied prefix tails, and the commit of the accepted path."""

import torch

from specsim.config import SpecConfig
from specsim.phases import Batch
from specsim.pool import KVPool, lane_stride, prefix_tail


def lane_columns(seq_len: int, config: SpecConfig) -> torch.Tensor:
    """Columns i64 [K, S] in which lane k writes its KV of step s.

    Lanes follow each other after L; with pages and several lanes each lane starts on pages of its own, after room for
    a copy of the prefix's tail, and lane 0's first page is the prefix's last.
    """
    first = seq_len + lane_stride(seq_len, config) * torch.arange(config.topk)
    return first[:, None] + torch.arange(config.num_steps)


def tail_columns(seq_len: int, config: SpecConfig) -> torch.Tensor:
    """Columns i64 [K, T] of each lane's copy of the prefix's last T tokens; T = 0 where lanes share the prefix."""
    tail = prefix_tail(seq_len, config)
    return lane_columns(seq_len, config)[:, :1] - tail + torch.arange(tail)


def duplicate_tails(batch: Batch, config: SpecConfig, pools: KVPool) -> None:
    """Copy the prefix tail's draft KV, content and not indices (sglang#7725), to lanes 1..K-1; once a round, before
    drafting.
    """
    for row, length in batch.rows_and_lens:
        slots = pools.slots(row, tail_columns(length, config))
        pools.draft.move(slots[:1].expand_as(slots[1:]).flatten(), slots[1:].flatten())


def commit(batch: Batch, cache_locations: torch.Tensor, accept_index: torch.Tensor, pools: KVPool) -> None:
    """Move the target KV of the accepted path to columns L..L+n; the whole path is read before any of it is written."""
    for (row, length), path in zip(batch.rows_and_lens, accept_index, strict=True):
        nodes = path[path >= 0].long()
        columns = length + torch.arange(len(nodes))
        pools.target.move(cache_locations[nodes], pools.slots(row, columns))
