"""Tensors that an engine dumped, against the reference: the first that differs, and the readings that would fit."""

from specsim.correctness.parity.comparison import Fit, Parity, TensorComparison, compare
from specsim.correctness.parity.dump import known, read_dump, tokens_of, write_dump
from specsim.correctness.parity.trace import Scene, Tokens

__all__ = [
    "Fit", "Parity", "Scene", "TensorComparison", "Tokens", "compare", "known", "read_dump", "tokens_of", "write_dump",
]  # fmt: skip
