"""Formats of weights: bytes of each, and the arithmetic of its products.

Hardware without a rate for a format's dtype reads the weights as they are and widens them to the activations' dtype.
"""

from dataclasses import dataclass

from specsim.simulator.bounds import positive


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Format in which the weights of products are stored."""

    name: str
    bytes: float  # per weight, scales included
    dtype: str | None = None  # of the products, where the hardware has a rate for it; None: the activations'

    def __post_init__(self) -> None:
        positive("bytes", self.bytes)


HALF = WeightFormat("16 bits", 2.0)
FLOAT8 = WeightFormat("fp8", 1.0, "float8")  # activations are rounded to 8 bits too; their scales are not counted
MXFP4 = WeightFormat("mxfp4", 17 / 32)  # 4 bits, and 8 bits of scale for 32 weights; kernels widen it to 16 bits


def grouped(name: str, bits: int, size: int | None, group_bits: int, dtype: str | None = None) -> WeightFormat:
    """Make a format of `bits` per weight, and of `group_bits` for each group of `size`; None: for a whole row.

    The numbers of a whole row are not counted.
    """
    return WeightFormat(name, (bits + (group_bits / size if size else 0)) / 8, dtype)


NVFP4 = grouped("nvfp4", 4, 16, 8, "float4")  # activations are rounded to 4 bits too
