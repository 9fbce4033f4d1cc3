"""Logical columns of a round and their owners: draft lanes, copies of the prefix's tail, the tree."""

from collections.abc import Sequence

import torch

from specsim.core.column_counts import lane_stride, lanes_end, prefix_tail, round_columns, two_rounds
from specsim.core.config import SpecConfig
from specsim.core.pool import KVPool

__all__ = ["lane_columns", "lane_stride", "prefix_tail", "release_uncommitted", "reserve_lanes", "reserve_tree"]
__all__ += ["round_columns", "tail_columns", "two_rounds"]


def lane_columns(seq_len: int, config: SpecConfig) -> torch.Tensor:
    """Columns i64 [K, S] of the KV of lane k at step s.

    Lanes follow each other after L. With pages and several lanes, each lane starts on its own pages, after room for a
    copy of the prefix's tail; lane 0's first page is the prefix's last.
    """
    first = seq_len + lane_stride(seq_len, config) * torch.arange(config.topk)
    return first[:, None] + torch.arange(config.num_steps)


def tail_columns(seq_len: int, config: SpecConfig) -> torch.Tensor:
    """Columns i64 [K, T] of each lane's copy of the prefix's last T tokens.

    T is 0 where lanes share the prefix.
    """
    tail = prefix_tail(seq_len, config)
    return lane_columns(seq_len, config)[:, :1] - tail + torch.arange(tail)


def reserve_lanes(
    pools: KVPool,
    rows: Sequence[int],
    seq_lens: Sequence[int],
    config: SpecConfig,
    ahead: int = 0,
    block_rows: int = 0,
) -> None:
    """Reserve columns before the draft phase: for two rounds (release `finish`) or for this round's lanes (`round`).

    ahead: of the drafter, whose lanes and rows of accepted tokens reach that much further. block_rows: of a drafter
    that writes a block in place of lanes.
    """
    for row, length in zip(rows, seq_lens, strict=True):
        if config.release == "finish":
            end = two_rounds(length, config, ahead)
        else:
            end = length + block_rows if block_rows else lanes_end(length + ahead, config)
        pools.reserve(row, end)
        pools.mark_committed(row, length)


def reserve_tree(
    pools: KVPool, rows: Sequence[int], seq_lens: Sequence[int], config: SpecConfig, ahead: int = 0
) -> None:
    """Exchange the lanes' columns for the tree's after the draft phase, under release `round`.

    ahead: of the drafter, which needs that many columns after the committed ones.
    """
    if config.release == "round":
        for row, length in zip(rows, seq_lens, strict=True):
            pools.release(row, length + ahead)
        for row, length in zip(rows, seq_lens, strict=True):
            pools.reserve(row, length + config.num_draft_tokens + ahead)


def release_uncommitted(
    pools: KVPool, rows: Sequence[int], seq_lens: Sequence[int], config: SpecConfig, ahead: int = 0
) -> None:
    """Release all columns beyond the committed ones, which seq_lens counts, and `ahead` more, under release `round`."""
    if config.release == "round":
        for row, length in zip(rows, seq_lens, strict=True):
            pools.release(row, length + ahead)
