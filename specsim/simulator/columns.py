"""KV columns that requests own, for a batch at once: specsim.core.columns in numpy."""

import numpy as np

from specsim.core.config import SpecConfig


def round_columns(lengths: np.ndarray, config: SpecConfig) -> np.ndarray:
    """Most columns that requests of these committed lengths [B] own in their next round, int64 [B]."""
    columns = _reach(lengths, config)
    page = config.page_size
    return -(-columns // page) * page if config.release == "finish" else columns


def round_pages(lengths: np.ndarray, configs: tuple[SpecConfig, ...]) -> np.ndarray:
    """Pages of these columns where any of several settings, all of one page size, may be the next; int64 [B]."""
    columns = _reach(lengths, configs[0])
    for config in configs[1:]:
        columns = np.maximum(columns, _reach(lengths, config))
    return -(-columns // configs[0].page_size)


def _reach(lengths: np.ndarray, config: SpecConfig) -> np.ndarray:
    """The same columns before rounding to whole pages."""
    if config.release == "finish":
        return lengths + 2 * config.need
    page = config.page_size
    tail = 0 if config.lanes_share_prefix else lengths % page
    stride = config.num_steps if config.lanes_share_prefix else -(-(tail + config.num_steps) // page) * page
    return np.maximum(lengths - tail + config.topk * stride, lengths + config.num_draft_tokens)
