"""The named draws of specsim.core.uniforms in kernels, bit for bit."""

from typing import no_type_check

import triton
import triton.language as tl

from specsim.core.uniforms import Stream

# Streams as kernel constants.
PREFILL = tl.constexpr(int(Stream.PREFILL))
ACCEPT = tl.constexpr(int(Stream.ACCEPT))
FINAL = tl.constexpr(int(Stream.FINAL))
SYNTHETIC = tl.constexpr(int(Stream.SYNTHETIC))
DRAFT = tl.constexpr(int(Stream.DRAFT))
TOKEN_NOISE = tl.constexpr(int(Stream.TOKEN_NOISE))


@triton.jit
@no_type_check
def word(seed, request_id, stream, root_len, depth, index):
    """Draw an integer of 24 bits.

    seed is i64; every other argument is cut to 32 bits and broadcasts.
    """
    name = (depth.to(tl.uint32) << 8) | stream
    first, _, _, _ = tl.philox(
        seed, index.to(tl.uint32), root_len.to(tl.uint32), name.to(tl.uint32), request_id.to(tl.uint32)
    )
    return first >> 8


@triton.jit
@no_type_check
def named_uniform(seed, request_id, stream, root_len, depth, index):
    """Draw a uniform of 24 bits in [2⁻²⁴, 1 - 2⁻²⁴], f32, from the word of that name."""
    return tl.maximum(word(seed, request_id, stream, root_len, depth, index), 1).to(tl.float32) * (1.0 / 16777216)


@triton.jit
@no_type_check
def token_noise(seed, request_id, position, tokens):
    """Draw standard Gumbel noise for tokens at a position, f64, as f32 does not hold 53 bits."""
    name = (position.to(tl.uint32) * 0 + TOKEN_NOISE).to(tl.uint32)
    high, low, _, _ = tl.philox(seed, tokens.to(tl.uint32), position.to(tl.uint32), name, request_id.to(tl.uint32))
    word = (high.to(tl.int64) << 21) | (low.to(tl.int64) >> 11)
    uniform = tl.maximum(word, 1).to(tl.float64) * (1.0 / 9007199254740992)
    return -tl.log(-tl.log(uniform))
