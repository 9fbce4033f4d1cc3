"""Tensors that an engine dumped, against the reference: the first that differs, and the readings that would fit."""

from specsim.correctness.parity.comparison import Fit, Parity, TensorComparison, compare
from specsim.correctness.parity.dump import read_dump, select, tokens_of, write_dump
from specsim.correctness.parity.trace import PrefillScene, Tokens

__all__ = [
    "Fit",
    "Parity",
    "PrefillScene",
    "TensorComparison",
    "Tokens",
    "compare",
    "read_dump",
    "select",
    "tokens_of",
    "write_dump",
]
