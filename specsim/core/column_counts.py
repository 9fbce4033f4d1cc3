"""Counts of the columns that a request owns in a round, which need no torch."""

from specsim.core.config import SpecConfig, ceil_to


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
