"""Counts and owners of the logical columns of a round: draft lanes, copies of the prefix's tail, the tree."""

from collections.abc import Sequence

from specsim.core.config import SpecConfig, ceil_to
from specsim.core.page_pool import PagePool


def prefix_tail(seq_len: int, config: SpecConfig) -> int:
    """Count the tokens of the prefix's unfinished page, which every lane copies.

    L mod P, or 0 where lanes share the page.
    """
    return 0 if config.lanes_share_prefix else seq_len % config.page_size


def lane_stride(seq_len: int, config: SpecConfig) -> int:
    """Count the columns from one draft lane to the next: S, or whole pages where each lane owns pages."""
    if config.lanes_share_prefix:
        return config.num_steps
    return ceil_to(prefix_tail(seq_len, config) + config.num_steps, config.page_size)


def lanes_end(seq_len: int, config: SpecConfig) -> int:
    """Count the columns up to the end of the last draft lane."""
    return seq_len - prefix_tail(seq_len, config) + config.topk * lane_stride(seq_len, config)


def round_columns(seq_len: int, config: SpecConfig, ahead: int = 0) -> int:
    """Count the most columns that a request of L tokens owns in its next round.

    ahead: of the drafter, columns that it needs after the committed ones.
    """
    if config.release == "finish":
        return two_rounds(seq_len, config, ahead)
    return max(lanes_end(seq_len + ahead, config), seq_len + config.num_draft_tokens + ahead)


def two_rounds(seq_len: int, config: SpecConfig, ahead: int = 0) -> int:
    """Count the columns of a request of L tokens under release `finish`, with those that its drafter needs ahead.

    Two rounds that accept all S drafts end at L + 2(S + 1), and S + 1 is at most `need`. No row stands at or beyond
    max_len, so no more columns are needed there.
    """
    return config.reserved_columns(min(seq_len + ahead, config.length_limit))


def reserve_lanes(
    pools: PagePool,
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
    pools: PagePool, rows: Sequence[int], seq_lens: Sequence[int], config: SpecConfig, ahead: int = 0
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
    pools: PagePool, rows: Sequence[int], seq_lens: Sequence[int], config: SpecConfig, ahead: int = 0
) -> None:
    """Release all columns beyond the committed ones, which seq_lens counts, and `ahead` more, under release `round`."""
    if config.release == "round":
        for row, length in zip(rows, seq_lens, strict=True):
            pools.release(row, length + ahead)
