"""KV columns that requests own, for a batch at once: specsim.core.columns in numpy."""

import numpy as np

from specsim.core.config import SpecConfig


def round_columns(lengths: np.ndarray, config: SpecConfig) -> np.ndarray:
    """Compute the most columns, int64 [B], that requests of these lengths [B] own in their next round."""
    columns = _reach(lengths, config)
    page = config.page_size
    return -(-columns // page) * page if config.release == "finish" else columns


def round_pages(lengths: np.ndarray, configs: tuple[SpecConfig, ...]) -> np.ndarray:
    """Compute the pages of these columns, int64 [B], where the next round may have any of several settings.

    All settings have the same page size.
    """
    columns = _reach(lengths, configs[0])
    for config in configs[1:]:
        columns = np.maximum(columns, _reach(lengths, config))
    return -(-columns // configs[0].page_size)


def _reach(lengths: np.ndarray, config: SpecConfig) -> np.ndarray:
    """Compute the same columns before rounding to whole pages."""
    if config.release == "finish":
        return np.minimum(lengths, config.length_limit) + 2 * config.need
    page = config.page_size
    tail = 0 if config.lanes_share_prefix else lengths % page
    stride = config.num_steps if config.lanes_share_prefix else -(-(tail + config.num_steps) // page) * page
    return np.maximum(lengths - tail + config.topk * stride, lengths + config.num_draft_tokens)
