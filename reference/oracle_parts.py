"""Parts of the oracle's forwards: norms, projections and rotary embedding, after Hugging Face's models."""

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from specsim.core.errors import InputError

Tensors = Mapping[str, torch.Tensor]


def norm(tensors: Tensors, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute a named RMS norm (Zhang & Sennrich 2019)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return tensors[f"{name}.weight"] * wide.to(x.dtype)


def linear(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """Compute x Wᵀ (+ bias) with a named projection."""
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


def stored(tensors: Tensors, part: str, x: torch.Tensor) -> torch.Tensor:
    """Round keys or values (part key, value) as a pool in fp8_e4m3 does, where the tensors hold its scales."""
    scale = tensors.get(f"kv.{part}_scale")
    return x if scale is None else (x / scale).clip(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def rotate(rope: Any, x_ARD: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Apply rotary embedding to rows at positions first, first + 1, ..., with angles in float32.

    Channels are complex numbers: (i, i + D/2), or (2i, 2i + 1) where the rope is interleaved.
    """
    angle = torch.arange(first, first + x_ARD.shape[1], dtype=torch.float32)[:, None] * _frequencies(rope)
    turn = torch.complex(*((part * rope.amplitude).to(x_ARD.dtype).double() for part in (angle.cos(), angle.sin())))
    halves = x_ARD.unflatten(-1, (-1, 2) if rope.interleaved else (2, -1)).double()
    if not rope.interleaved:
        halves = halves.mT
    turned = torch.view_as_real(torch.view_as_complex(halves.contiguous()) * turn)
    return (turned if rope.interleaved else turned.mT).flatten(-2).to(x_ARD.dtype)


def _frequencies(rope: Any) -> torch.Tensor:
    """Angles of one position, f32 [D/2].

    Rope types llama3 and yarn slow waves that are long against the original context.
    """
    wave = rope.theta ** (torch.arange(0, rope.size, 2).float() / rope.size)
    frequency = 1.0 / wave
    rope_type = rope.scaling.get("rope_type", "default")
    if rope_type == "default":
        return frequency
    if rope_type == "yarn":
        unscaled_share = 1 - _yarn_ramp(rope)
        return 1.0 / (rope.scaling["factor"] * wave) * (1 - unscaled_share) + frequency * unscaled_share
    if rope_type != "llama3":
        raise InputError("rope_type", rope_type, "default, llama3 or yarn")
    factor, low, high = (rope.scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    context = rope.scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    smooth = (context / wavelength - low) / (high - low)
    blend = (1 - smooth) * frequency / factor + smooth * frequency
    slow = torch.where(wavelength > context / low, frequency / factor, blend)
    return torch.where(wavelength < context / high, frequency, slow)


def _yarn_ramp(rope: Any) -> torch.Tensor:
    """Share of each pair's slowing: 0 from beta_fast rotations in the original context, 1 below beta_slow ones."""
    scaling = rope.scaling
    context = scaling["original_max_position_embeddings"] / (2 * math.pi)
    # Pairs, as real numbers, with these rotations: context · theta^(-2 pair / D) = rotations.
    ends = [math.log(context / scaling[name]) / math.log(rope.theta) for name in ("beta_fast", "beta_slow")]
    ends = [end * rope.size / 2 for end in ends]
    if scaling["truncate"]:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    start, end = max(ends[0], 0), min(ends[1], rope.size - 1)
    pair = torch.arange(rope.size // 2).float()
    return torch.clip((pair - start) / ((end - start) or 0.001), 0, 1)
