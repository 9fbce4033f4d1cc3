"""Logits in device code, read from the raw or the adjusted rows."""

import torch
import triton.language as tl

from specsim.fast.runtime.launch import kernel
from specsim.fast.vocabulary.summaries import LogitRows, logits_at


@kernel
def _read(raw_ptr, adjusted_ptr, is_adjusted_ptr, out_ptr, vocab_size, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    row, tokens = tl.arange(0, ROWS)[:, None], tl.arange(0, TOKENS)[None, :] - 1
    rows = LogitRows(raw_ptr, adjusted_ptr, tl.load(is_adjusted_ptr + row), row * vocab_size, vocab_size)
    mask = (row >= 0) & (tokens != 2)
    tl.store(out_ptr + row * TOKENS + tokens + 1, logits_at(rows, tokens, mask))


def test_logits_are_raw_or_adjusted_and_none_where_masked(device):
    """Tokens are -1 to 6 of a vocabulary of 5, without 2.

    NaN is where nothing may read.
    """
    raw_RV, adjusted_RV = torch.randn(2, 5).bfloat16(), torch.randn(2, 5)
    expected_RV = torch.stack([raw_RV[0].float(), adjusted_RV[1]])
    raw_RV[1], adjusted_RV[0] = torch.nan, torch.nan
    out = torch.empty(2, 8, device=device)
    is_adjusted = torch.tensor([0, 1], dtype=torch.int32, device=device)
    _read[(1,)](raw_RV.to(device), adjusted_RV.to(device), is_adjusted, out, 5, ROWS=2, TOKENS=8)
    expected = torch.full((2, 8), -torch.inf)
    expected[:, 1:6] = expected_RV
    expected[:, 3] = -torch.inf
    assert torch.equal(out.cpu(), expected)
