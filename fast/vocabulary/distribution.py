"""Distributions of rows over the vocabulary, and what device functions read of them."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specsim.fast.vocabulary.filters import logits_at
from specsim.fast.vocabulary.penalties import Logits
from specsim.fast.vocabulary.summaries import rank, weights_of

LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class Law:
    """The laws of rows, over their logits.

    maxima, sums: f32 [R, G], the summaries of the rows' groups of tokens. moments: f32 [R, 4], the largest logit,
    log2(e) / T (T = 1 when greedy), log2 of the sum of all weights, and the sum of those kept. lasts: i32 [R, 3], rank
    and token of the last that is kept, and whether the row is read from the adjusted logits.
    """

    logits: Logits
    maxima: torch.Tensor
    sums: torch.Tensor
    moments: torch.Tensor
    lasts: torch.Tensor

    @property
    def table(self) -> tuple[torch.Tensor | int, ...]:
        """What device functions know as `laws`."""
        raw = self.logits.raw
        return raw, self.logits.adjusted, self.maxima, self.sums, self.moments, self.lasts, raw.shape[1]


@triton.jit
def _rows_of(laws, row):
    logits_ptr, adjusted_ptr, _, _, _, lasts_ptr, vocab_size = laws
    return logits_ptr, adjusted_ptr, tl.load(lasts_ptr + row * 3 + 2), row * vocab_size, vocab_size


@triton.jit
def weight(laws, row, tokens):
    """Weights of tokens at a row: their probabilities times kept_mass."""
    moments_ptr, lasts_ptr = laws[4], laws[5]
    logits = logits_at(_rows_of(laws, row), tokens, tokens >= 0)
    best, scale = tl.load(moments_ptr + row * 4), tl.load(moments_ptr + row * 4 + 1)
    last_rank, last_token = tl.load(lasts_ptr + row * 3), tl.load(lasts_ptr + row * 3 + 1)
    ranks = rank(logits)
    kept = (ranks > last_rank) | ((ranks == last_rank) & (tokens <= last_token))
    return tl.where(kept, weights_of(logits, best, scale), 0.0)


@triton.jit
def kept_mass(laws, row):
    """The sum of a row's weights."""
    return tl.load(laws[4] + row * 4 + 3)


@triton.jit
def only_token(laws, row):
    """The one token that a row of temperature 0 keeps."""
    return tl.load(laws[5] + row * 3 + 1)


@triton.jit
def logprob(laws, rows, tokens, mask):
    """log softmax(adjusted / T) of tokens at rows, T = 1 when greedy, before filters; 0 where masked or no token."""
    moments_ptr = laws[4]
    mask &= tokens >= 0
    logits = tl.where(mask, logits_at(_rows_of(laws, tl.where(mask, rows, 0)), tokens, mask), 0.0)
    best = tl.load(moments_ptr + rows * 4, mask=mask, other=0.0)
    scale = tl.load(moments_ptr + rows * 4 + 1, mask=mask, other=0.0)
    log_sum = tl.load(moments_ptr + rows * 4 + 2, mask=mask, other=0.0)
    return tl.where(mask, ((logits - best) * scale - log_sum) * LN_2, 0.0)
