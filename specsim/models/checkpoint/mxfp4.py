"""Weights in MXFP4 (OCP microscaling formats 1.0): blocks of 32 numbers in 4 bits with one power of two."""

import torch

from specsim.core.errors import require

BLOCK = 32
# By code: a sign bit, two bits of the exponent, one of the mantissa.
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127  # of the scales' exponents


def dequantised(blocks: torch.Tensor, scales: torch.Tensor, where: str) -> torch.Tensor:
    """Compute the numbers of blocks, bf16 [..., 32 · blocks], which bfloat16 represents exactly.

    blocks: u8 [..., blocks, 16], each byte with an even number's code in its low half and the next one's in its high
    half. scales: u8 [..., blocks]. where: name and file, for the InputError of other shapes or types.
    """
    require(blocks.dtype == scales.dtype == torch.uint8, f"the type of {where}", blocks.dtype, "uint8, with its scales")
    shape = [*scales.shape, BLOCK // 2]
    require([*blocks.shape] == shape, f"the shape of {where}", [*blocks.shape], f"{shape}, as its scales have")
    values = torch.tensor(_VALUES, dtype=torch.bfloat16)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    numbers = torch.ldexp(values[codes.int()], scales.int()[..., None] - _BIAS)
    return numbers.flatten(-2)
