"""Near-duplicate files, by a bottom-k sketch of their shingles (Broder 1997, "On the resemblance of documents")."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

SHINGLE_DOUBLINGS = 5  # a shingle is 2^5 = 32 bytes of the text without its white space
SKETCH_SIZE = 256
MULTIPLIER = 0x9E3779B97F4A7C15


def sketch(text: str) -> np.ndarray:
    """Give the `SKETCH_SIZE` smallest distinct hashes (uint64, ascending) of the text's shingles."""
    hashes = np.frombuffer(re.sub(r"\s+", "", text).encode(), np.uint8).astype(np.uint64)
    for doubling in range(SHINGLE_DOUBLINGS):
        width = 1 << doubling
        hashes = hashes[:-width] * np.uint64(pow(MULTIPLIER, width, 1 << 64)) + hashes[width:]
    hashes = (hashes ^ (hashes >> np.uint64(31))) * np.uint64(MULTIPLIER)
    return np.unique(hashes ^ (hashes >> np.uint64(29)))[:SKETCH_SIZE]


def resemblance(first: np.ndarray, second: np.ndarray) -> float:
    """Estimate the Jaccard index of two shingle sets from their sketches."""
    smallest = np.union1d(first, second)[:SKETCH_SIZE]
    shared = np.intersect1d(first, second, assume_unique=True)
    return float(np.isin(smallest, shared).mean()) if len(smallest) else 0.0


def near_duplicates(candidates: Sequence[np.ndarray], references: Sequence[np.ndarray], threshold: float) -> set[int]:
    """Give the indices of the candidate sketches that resemble any reference by at least `threshold`."""
    holders = defaultdict(list)
    for index, reference in enumerate(references):
        for value in reference.tolist():
            holders[value].append(index)
    found = set()
    for index, candidate in enumerate(candidates):
        meetings = Counter(holder for value in candidate.tolist() for holder in holders.get(value, ()))
        if any(resemblance(candidate, references[holder]) >= threshold for holder in meetings):
            found.add(index)
    return found
