"""Distributions of rows over the vocabulary, and the device functions that read them."""

from dataclasses import dataclass
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.vocabulary.logit_rows import LogitRows, logits_at
from specsim.fast.vocabulary.penalties import Logits
from specsim.fast.vocabulary.summaries import rank, weights_of

LN_2 = tl.constexpr(0.6931471805599453)


class DistributionTables(NamedTuple):
    """Distributions as kernel arguments, named `distributions`."""

    logits_ptr: torch.Tensor
    adjusted_ptr: torch.Tensor
    maxima_ptr: torch.Tensor
    sums_ptr: torch.Tensor
    moments_ptr: torch.Tensor
    lasts_ptr: torch.Tensor
    vocab_size: int


@dataclass(frozen=True, slots=True)
class Distributions:
    """Distributions of R rows: their logits, the summaries of these, and the tokens that filters keep."""

    logits: Logits
    maxima: torch.Tensor  # f32 [R, G], largest logit of each group of tokens
    sums: torch.Tensor  # f32 [R, G], sum of the group's weights
    moments: torch.Tensor  # f32 [R, 4]: largest logit; log2(e) / T; log2 of the sum of all weights; sum of those kept
    lasts: torch.Tensor  # i32 [R, 3]: rank and token of the last that is kept; whether logits are the adjusted ones

    @property
    def tables(self) -> DistributionTables:
        raw = self.logits.raw
        adjusted = self.logits.adjusted
        return DistributionTables(raw, adjusted, self.maxima, self.sums, self.moments, self.lasts, raw.shape[1])


@triton.jit
@no_type_check
def _rows_of(distributions, row):
    is_adjusted = tl.load(distributions.lasts_ptr + row * 3 + 2)
    first = row * distributions.vocab_size
    return LogitRows(distributions.logits_ptr, distributions.adjusted_ptr, is_adjusted, first, distributions.vocab_size)


@triton.jit
@no_type_check
def weight(distributions, row, tokens):
    """Compute the weights of tokens at a row, which are their probabilities times kept_mass."""
    logits = logits_at(_rows_of(distributions, row), tokens, tokens >= 0)
    best = tl.load(distributions.moments_ptr + row * 4)
    scale = tl.load(distributions.moments_ptr + row * 4 + 1)
    last_rank = tl.load(distributions.lasts_ptr + row * 3)
    last_token = tl.load(distributions.lasts_ptr + row * 3 + 1)
    ranks = rank(logits)
    kept = (ranks > last_rank) | ((ranks == last_rank) & (tokens <= last_token))
    return tl.where(kept, weights_of(logits, best, scale), 0.0)


@triton.jit
@no_type_check
def kept_mass(distributions, row):
    """Load the sum of a row's weights."""
    return tl.load(distributions.moments_ptr + row * 4 + 3)


@triton.jit
@no_type_check
def prob_of(distributions, row, tokens):
    """Compute the probabilities of tokens at a row."""
    return weight(distributions, row, tokens) / kept_mass(distributions, row)


@triton.jit
@no_type_check
def only_token(distributions, row):
    """Load the one token that a row of temperature 0 keeps."""
    return tl.load(distributions.lasts_ptr + row * 3 + 1)


@triton.jit
@no_type_check
def logprob(distributions, rows, tokens, mask):
    """Compute log softmax(adjusted / T) of tokens at rows, before filters.

    T is 1 when greedy. The result is 0 where masked or without a token.
    """
    moments_ptr = distributions.moments_ptr
    mask &= tokens >= 0
    logits = logits_at(_rows_of(distributions, tl.where(mask, rows, 0)), tokens, mask)
    logits = tl.where(mask, logits, 0.0)
    best = tl.load(moments_ptr + rows * 4, mask=mask, other=0.0)
    scale = tl.load(moments_ptr + rows * 4 + 1, mask=mask, other=0.0)
    log_sum = tl.load(moments_ptr + rows * 4 + 2, mask=mask, other=0.0)
    return tl.where(mask, ((logits - best) * scale - log_sum) * LN_2, 0.0)
