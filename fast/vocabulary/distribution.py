"""Distributions of rows over the vocabulary, their readers in kernels, and draws from them.

A draw is by Gumbel noise or by inverse CDF, first over token groups and then in one.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.phases import Batch
from specsim.fast.runtime.launch import next_power_of_2
from specsim.fast.runtime.uniforms import named_uniform
from specsim.fast.vocabulary.penalties import Logits
from specsim.fast.vocabulary.summaries import LOWEST_RANK, LogitRows, logits_at, num_groups, rank, weights_of

LN_2 = tl.constexpr(0.6931471805599453)
PER = 8  # groups that are read again at once


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
    in_cut = (ranks > last_rank) | ((ranks == last_rank) & (tokens <= last_token))
    return tl.where(in_cut, weights_of(logits, best, scale), 0.0)


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


class Requests(NamedTuple):
    """Temperatures of requests and the names of their uniforms, as kernel arguments, [B]."""

    temperature_ptr: torch.Tensor  # f64
    seq_lens_ptr: torch.Tensor  # i64, L, 0 for a padded request
    seeds_ptr: torch.Tensor  # i64
    request_ids_ptr: torch.Tensor  # i64

    @classmethod
    def of(cls, batch: Batch) -> Self:
        return cls(batch.sampling.temperature, batch.seq_lens, batch.seeds, batch.request_ids)


class Workspace(NamedTuple):
    """Workspace of draws, one row each."""

    masses_ptr: torch.Tensor  # f32 [draws, G], masses of groups
    numbers_ptr: torch.Tensor  # i32 [draws, G], numbers of groups

    @classmethod
    def of(cls, distributions: Distributions, count: int) -> Self:
        """Allocate the workspace of `count` draws."""
        maxima = distributions.maxima
        masses = maxima.new_empty(count, maxima.shape[1])
        return cls(masses, torch.empty_like(masses, dtype=torch.int32))


class Siblings(NamedTuple):
    """Rejected siblings of a tree in device code, None in a draw without a tree."""

    tokens_ptr: tl.tensor
    next_sibling_ptr: tl.tensor
    first: tl.tensor  # i64, node of the first of them, or -1
    num_nodes: tl.tensor


class BlockBests(NamedTuple):
    """Best token of every block of a row by its score with Gumbel noise."""

    scores_ptr: torch.Tensor  # f64 [R, blocks]
    tokens_ptr: torch.Tensor  # i32 [R, blocks]
    num_blocks: int

    @classmethod
    def empty(cls, num_rows: int, num_blocks: int, device: torch.device) -> Self:
        scores = torch.empty(num_rows, num_blocks, dtype=torch.float64, device=device)
        return cls(scores, torch.empty_like(scores, dtype=torch.int32), num_blocks)


def groups_block(vocab_size: int) -> int:
    """Compute the block size for all groups of a row."""
    return next_power_of_2(num_groups(vocab_size))


@triton.jit
@no_type_check
def uniform_of(requests, request, stream, root_len, depth):
    """Draw a request's uniform by its name, for lane 0."""
    seed = tl.load(requests.seeds_ptr + request)
    request_id = tl.load(requests.request_ids_ptr + request)
    return named_uniform(seed, request_id, stream, root_len, depth, tl.full((), 0, tl.int32))


@triton.jit
@no_type_check
def store_best(bests, row, block, tokens, scores, last_token):
    """Store the best of a block's tokens, the lowest of equals."""
    largest = tl.max(scores, axis=0)
    chosen = tl.min(tl.where(scores == largest, tokens, last_token), axis=0)
    tl.store(bests.scores_ptr + row * bests.num_blocks + block, largest)
    tl.store(bests.tokens_ptr + row * bests.num_blocks + block, chosen)


@triton.jit
@no_type_check
def best_token(bests, row, BLOCKS: tl.constexpr):
    """Find the best token of a row, in the first of its best blocks."""
    blocks = tl.arange(0, BLOCKS)  # [BLOCKS]
    num_blocks = bests.num_blocks
    first_block = row * num_blocks
    scores = tl.load(bests.scores_ptr + first_block + blocks, mask=blocks < num_blocks, other=-float("inf"))
    block = tl.min(tl.where(scores == tl.max(scores, axis=0), blocks, num_blocks - 1), axis=0)
    return tl.load(bests.tokens_ptr + first_block + block)


@triton.jit
@no_type_check
def _residual(distributions, row, siblings, tokens):
    """Compute the weights of tokens at a row, 0 for tokens of siblings."""
    weights = weight(distributions, row, tokens)
    if siblings is not None:
        node = siblings.first
        seen = 0
        while (node >= 0) & (node < siblings.num_nodes) & (seen < siblings.num_nodes):
            weights = tl.where(tokens == tl.load(siblings.tokens_ptr + node), 0.0, weights)
            node = tl.load(siblings.next_sibling_ptr + node)
            seen += 1
    return weights


@triton.jit
@no_type_check
def _group_masses(
    distributions, row, siblings, workspace, GROUP: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr
):
    """Compute the residual's mass in every group [GROUPS].

    Masses come from the summaries, except for groups that contain a cut or a sibling.
    """
    moments_ptr = distributions.moments_ptr
    groups = tl.arange(0, GROUPS)  # [GROUPS]
    num_groups = tl.cdiv(distributions.vocab_size, GROUP)
    mask = groups < num_groups
    maxima = tl.load(distributions.maxima_ptr + row * num_groups + groups, mask=mask, other=float("-inf"))
    sums = tl.load(distributions.sums_ptr + row * num_groups + groups, mask=mask, other=0.0)
    masses = sums * weights_of(maxima, tl.load(moments_ptr + row * 4), tl.load(moments_ptr + row * 4 + 1))
    last_rank = tl.load(distributions.lasts_ptr + row * 3)
    is_cut = last_rank > LOWEST_RANK
    masses = tl.where(is_cut, 0.0, masses)
    touched = mask & is_cut & (rank(maxima) >= last_rank)
    if siblings is not None:
        node = siblings.first
        seen = 0
        while (node >= 0) & (node < siblings.num_nodes) & (seen < siblings.num_nodes):
            touched |= mask & (groups == tl.load(siblings.tokens_ptr + node) // GROUP)
            node = tl.load(siblings.next_sibling_ptr + node)
            seen += 1
    size = tl.sum(touched.to(tl.int32), axis=0)
    if size > 0:
        tl.debug_barrier()  # the workspace may still be read as of an earlier call
        tl.store(workspace.numbers_ptr + tl.cumsum(touched.to(tl.int32), axis=0) - 1, groups, mask=touched)
        tl.store(workspace.masses_ptr + groups, masses, mask=mask)
        tl.debug_barrier()
        for start in range(0, size, PER):
            entries = start + tl.arange(0, PER)  # [PER]
            number = tl.load(workspace.numbers_ptr + entries, mask=entries < size, other=num_groups)
            tokens = number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [PER, GROUP]
            group_mass = tl.sum(_residual(distributions, row, siblings, tokens), axis=1)  # [PER]
            tl.store(workspace.masses_ptr + number, group_mass, mask=entries < size)
        tl.debug_barrier()
        masses = tl.load(workspace.masses_ptr + groups, mask=mask, other=0.0)
    return masses


@triton.jit
@no_type_check
def group_at(masses, uniform, GROUPS: tl.constexpr):
    """Find the group at the share `uniform` of all masses: (group, mass before it, mass at the share)."""
    groups = tl.arange(0, GROUPS)  # [GROUPS]
    cdf = tl.cumsum(masses, axis=0)
    bound = uniform * tl.max(cdf, axis=0)
    first_above = tl.min(tl.where((masses > 0) & (cdf > bound), groups, GROUPS), axis=0)
    last = tl.maximum(tl.max(tl.where(masses > 0, groups, -1), axis=0), 0)
    group = tl.where(
        first_above < GROUPS, first_above, last
    )  # a parallel scan may have its peak where there is no mass
    return group, tl.sum(tl.where(groups == group - 1, cdf, 0.0), axis=0), bound


@triton.jit
@no_type_check
def token_at(tokens, weights, before, bound, vocab_size):
    """Find the first token of a group that has weight and at which the cumulative mass exceeds the bound."""
    first = tl.min(tl.where((weights > 0) & (before + tl.cumsum(weights, axis=0) > bound), tokens, vocab_size), axis=0)
    last = tl.maximum(tl.max(tl.where(weights > 0, tokens, -1), axis=0), 0)
    return tl.where(first < vocab_size, first, last)


@triton.jit
@no_type_check
def drawn_group(
    distributions,
    row,
    siblings,
    uniform,
    workspace,
    workspace_row,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
):
    """Find the group of the drawn token: (group, mass before it, mass at the uniform, first sibling).

    The siblings from that one on are left out, none of them if no mass remains without them. place: this program's row
    of the workspace.
    """
    offset = workspace_row * tl.cdiv(distributions.vocab_size, GROUP)
    space = Workspace(workspace.masses_ptr + offset, workspace.numbers_ptr + offset)
    masses = _group_masses(distributions, row, siblings, space, GROUP, GROUPS, PER)
    first = tl.full((), -1, tl.int64)
    if siblings is not None:
        first = siblings.first
        if (first >= 0) & (tl.sum(masses, axis=0) == 0):
            first = tl.full((), -1, tl.int64)
            none = Siblings(siblings.tokens_ptr, siblings.next_sibling_ptr, first, siblings.num_nodes)
            masses = _group_masses(distributions, row, none, space, GROUP, GROUPS, PER)
    group, before, bound = group_at(masses, uniform, GROUPS)
    return group, before, bound, first


@triton.jit
@no_type_check
def draw(
    distributions,
    row,
    siblings,
    uniform,
    workspace,
    workspace_row,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
):
    """Find the first token with weight and cdf > uniform · cdf[last], without rejected siblings.

    If no mass remains without the siblings, the whole distribution is used. place: this program's row of the workspace.
    """
    group, before, bound, first = drawn_group(
        distributions, row, siblings, uniform, workspace, workspace_row, GROUP, GROUPS, PER
    )
    rejected = siblings
    if siblings is not None:
        rejected = Siblings(siblings.tokens_ptr, siblings.next_sibling_ptr, first, siblings.num_nodes)
    tokens = group * GROUP + tl.arange(0, GROUP)  # [GROUP]
    weights = _residual(distributions, row, rejected, tokens)
    return token_at(tokens, weights, before, bound, distributions.vocab_size)
