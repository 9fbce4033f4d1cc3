"""Chunked prefill: the parts of prompts in a step."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Chunk(NamedTuple):
    """Columns of a prompt that a step prefills."""

    request: int
    start: int
    end: int


def next_chunks(requests: Sequence[int], filled: np.ndarray, lengths: np.ndarray, most: int | None) -> list[Chunk]:
    """Choose chunks of prompts for a step, at most `most` tokens, earlier requests first."""
    left = most
    chunks = []
    for request in requests:
        start = int(filled[request])
        length = int(lengths[request])
        end = length if left is None else min(length, start + left)
        if end > start:
            left = None if left is None else left - (end - start)
            chunks.append(Chunk(request, start, end))
    return chunks


def sizes(chunks: Sequence[Chunk]) -> tuple[np.ndarray, np.ndarray]:
    """Count the tokens of each chunk, and those before it."""
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    return np.array([chunk.end for chunk in chunks], dtype=np.int64) - starts, starts
