"""Rows of logits in device code, each raw or adjusted."""

from typing import NamedTuple, no_type_check

import triton
import triton.language as tl


class LogitRows(NamedTuple):
    """Rows of logits on the device, raw or adjusted."""

    logits_ptr: tl.tensor
    adjusted_ptr: tl.tensor
    is_adjusted: tl.tensor  # whether the row is read from adjusted_ptr; broadcasts to the tokens' shape
    first: tl.tensor  # place of the row's first token; broadcasts to the tokens' shape
    vocab_size: tl.tensor


@triton.jit
@no_type_check
def logits_at(rows, tokens, mask):
    """Load logits of tokens of rows after penalties and bias, f32."""
    mask &= (tokens >= 0) & (tokens < rows.vocab_size)
    is_raw = rows.is_adjusted == 0
    is_adjusted = rows.is_adjusted != 0
    raw = tl.load(rows.logits_ptr + rows.first + tokens, mask=mask & is_raw, other=float("-inf")).to(tl.float32)
    adjusted = tl.load(rows.adjusted_ptr + rows.first + tokens, mask=mask & is_adjusted, other=float("-inf"))
    return tl.where(is_adjusted, adjusted, raw)
