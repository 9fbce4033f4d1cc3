"""The law of every row without sorting its vocabulary: bisection on the order of f32, ties to the lower id.

A row's law is told by weights 2^((x - max) · log2(e) / T), of which a prefix of the ranking (by logit, then by id) is
kept: probability = weight / mass of the kept. Temperature 0 keeps the best token alone.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from specsim.fast.launch import INTERPRETED, block_of, kernel, require_contiguous
from specsim.phases import Batch
from specsim.pool import KVPool

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST_RANK = tl.constexpr(-(2**31))  # below the rank of every number
# T and biases are held where (x - max) · log2(e) / T neither overflows nor is 0 · inf; beyond, laws have no shape left.
LEAST_T, MOST_T, MOST_BIAS = tl.constexpr(1e-20), tl.constexpr(1e30), tl.constexpr(1e18)
LEAST_P = tl.constexpr(1e-30)  # of top_p, so that the best token is always kept

VOCAB_BLOCK = 4096  # tokens of one tile


def vocab_block(vocab_size: int, rows: int = 1) -> int:
    """Tokens of a tile that has as many rows; a function of the vocabulary alone for one row."""
    most = VOCAB_BLOCK if rows == 1 else max(64, (2**18 if INTERPRETED else 2**13) // rows)
    return min(triton.next_power_of_2(vocab_size), most)


@triton.jit
def penalised(repetition_ptr, presence_ptr, frequency_ptr, request):
    """Whether a request's logits depend on its tokens."""
    repeats = tl.load(repetition_ptr + request) != 1
    return repeats | (tl.load(presence_ptr + request) != 0) | (tl.load(frequency_ptr + request) != 0)


@kernel
def _token_counts(
    token_ids_ptr,
    stride_token_ids,
    rows_ptr,
    seq_lens_ptr,
    prompt_lens_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    vocab_size,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    offs = first + tl.arange(0, BLOCK)
    counts_ptr += request * 2 * vocab_size
    for half in range(2):
        tl.store(counts_ptr + half * vocab_size + offs, tl.full((BLOCK,), 0, tl.int32), mask=offs < vocab_size)
    tl.debug_barrier()
    row = tl.load(rows_ptr + request)
    if (row >= 0) & penalised(repetition_ptr, presence_ptr, frequency_ptr, request):
        length, prompt_len = tl.load(seq_lens_ptr + request), tl.load(prompt_lens_ptr + request)
        for start in range(0, length, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            token = tl.load(token_ids_ptr + row * stride_token_ids + column, mask=column < length, other=-1)
            own = (token >= first) & (token < tl.minimum(first + BLOCK, vocab_size))
            part = (column >= prompt_len).to(tl.int64)
            tl.atomic_add(counts_ptr + part * vocab_size + token, 1, mask=own, sem="relaxed")


def token_counts(batch: Batch, pools: KVPool, vocab_size: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Occurrences of every token in columns 0..L-1, i32 [B, 2, V]: [0] within the prompt, [1] after it.

    All zero for a request without penalties, which never reads them, and for a padded row.
    """
    sampling, table = batch.sampling, pools.token_ids
    out = torch.empty(batch.size, 2, vocab_size, dtype=torch.int32, device=table.device) if out is None else out
    block = vocab_block(vocab_size)
    _token_counts[(batch.size, triton.cdiv(vocab_size, block))](
        table,
        table.stride(0),
        batch.req_pool_indices,
        batch.seq_lens,
        batch.prompt_lens,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        out,
        vocab_size,
        BLOCK=block,
        COLUMNS=1024,
    )
    return out


@kernel
def _adjust(
    logits_ptr,
    counts_ptr,
    tokens_ptr,
    parents_ptr,
    rows_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_ptr,
    out_ptr,
    num_nodes,
    levels,
    vocab_size,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    offs_n, offs_v = tl.arange(0, NODES), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_n, mask_v = offs_n < num_nodes, offs_v < vocab_size
    mask = mask_n[:, None] & mask_v[None, :]
    offs = (request * num_nodes + offs_n)[:, None] * vocab_size + offs_v[None, :]
    if tl.load(rows_ptr + request) < 0:
        tl.store(out_ptr + offs, tl.full((NODES, BLOCK), 0, tl.float32), mask=mask)
    else:
        logits = tl.load(logits_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        if penalised(repetition_ptr, presence_ptr, frequency_ptr, request):
            counts = counts_ptr + request * 2 * vocab_size + offs_v
            in_prompt = tl.load(counts, mask=mask_v, other=0)
            output = tl.load(counts + vocab_size, mask=mask_v, other=0)[None, :] + tl.full((NODES, BLOCK), 0, tl.int32)
            if tokens_ptr is not None:
                node = tl.where(mask_n, tl.where(levels > 1, offs_n, 0), -1).to(tl.int64)
                for _ in range(levels):
                    known = (node >= 0) & (node < num_nodes)
                    token = tl.load(tokens_ptr + request * num_nodes + node, mask=known, other=-1)
                    output += (token[:, None] == offs_v[None, :]).to(tl.int32)
                    node = tl.load(parents_ptr + request * num_nodes + node, mask=known, other=-1)
            repetition = tl.load(repetition_ptr + request).to(tl.float32)
            repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
            logits = tl.where(in_prompt[None, :] + output > 0, repeated, logits)
            frequency = tl.load(frequency_ptr + request).to(tl.float32)
            presence = tl.load(presence_ptr + request).to(tl.float32)
            logits -= frequency * output.to(tl.float32) + tl.where(output > 0, presence, 0.0)
        bias = tl.load(bias_ptr + request * vocab_size + offs_v, mask=mask_v, other=0.0)
        bias = tl.minimum(tl.maximum(bias, -MOST_BIAS), MOST_BIAS).to(tl.float32)
        tl.store(out_ptr + offs, logits + bias[None, :], mask=mask)


def adjust_logits(
    batch: Batch,
    logits_RV: torch.Tensor,
    counts_B2V: torch.Tensor,
    tree: tuple[torch.Tensor, torch.Tensor] | None,
    levels: int,
    out: torch.Tensor,
) -> None:
    """Write logits after penalties and bias to `out`, f32; penalties, bias and the path's counts in one pass.

    tree: (tokens, parents), i64 [B, N]. levels: how many nodes of its path, from itself up, a row counts beside
    counts_B2V; 1 is the root alone, for every row, and 0 nothing. Rows of padded requests become 0.
    """
    vocab_size, num_nodes = logits_RV.shape[-1], logits_RV.numel() // max(1, batch.size * logits_RV.shape[-1])
    tokens, parents = tree or (None, None)
    sampling, nodes = batch.sampling, triton.next_power_of_2(max(1, num_nodes))
    require_contiguous(logits=logits_RV, counts=counts_B2V, logit_bias=sampling.logit_bias, out=out)
    block = vocab_block(vocab_size, nodes)
    _adjust[(batch.size, triton.cdiv(vocab_size, block))](
        logits_RV,
        counts_B2V,
        tokens,
        parents,
        batch.req_pool_indices,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.logit_bias,
        out,
        num_nodes,
        levels,
        vocab_size,
        NODES=nodes,
        BLOCK=block,
    )


@triton.jit
def rank(logits):
    """An i32 in the order of f32, -0 and 0 alike."""
    bits = logits.to(tl.int32, bitcast=True)
    return tl.where(logits == 0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _tile(rows, start, BLOCK: tl.constexpr):
    """(tokens [1, BLOCK], logits [ROWS, BLOCK]) of rows from token `start` on, -inf beyond the vocabulary."""
    logits, mask, vocab_size = rows
    tokens = start + tl.arange(0, BLOCK)[None, :]
    return tokens, tl.load(logits[:, None] + tokens, mask=mask[:, None] & (tokens < vocab_size), other=float("-inf"))


@triton.jit
def _best(rows, BLOCK: tl.constexpr):
    """(largest logit, its lowest token) of rows."""
    _, mask, vocab_size = rows
    best, token = tl.full(mask.shape, float("-inf"), tl.float32), tl.full(mask.shape, 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens, logits = _tile(rows, start, BLOCK)
        largest = tl.max(logits, axis=1)
        lowest = tl.min(tl.where(logits == largest[:, None], tokens, vocab_size), axis=1)
        token = tl.where(largest > best, lowest, token)
        best = tl.maximum(largest, best)
    return tl.where(mask, best, 0.0), token


@triton.jit
def _mass(rows, best, scale, last_rank, last_token, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the weights kept of rows; with COUNT how many are kept."""
    mass = tl.full(best.shape, 0, tl.float32)
    for start in range(0, rows[2], BLOCK):
        tokens, logits = _tile(rows, start, BLOCK)
        ranks, bound = rank(logits), last_rank[:, None]
        kept = (ranks > bound) | ((ranks == bound) & (tokens <= last_token[:, None]))
        weights = 1.0 if COUNT else tl.exp2((logits - best[:, None]) * scale[:, None])
        mass += tl.sum(tl.where(kept, weights, 0.0), axis=1)
    return mass


@triton.jit
def _keep_before(rows, best, scale, last_rank, last_token, target, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """(last rank, last token) of the kept that have less than `target` of mass, with COUNT of tokens, before them."""
    none = tl.full(best.shape, -1, tl.int32)
    low, high = last_rank.to(tl.int64) - 1, rank(best).to(tl.int64)
    while tl.max(high - low) > 1:  # above `high` there is less than target, above `low` there is not
        middle = (low + high) >> 1
        above = _mass(rows, best, scale, tl.maximum(middle, LOWEST_RANK).to(tl.int32), none, COUNT, BLOCK)
        low, high = tl.where(above < target, low, middle), tl.where(above < target, middle, high)
    bound = high.to(tl.int32)
    above = _mass(rows, best, scale, bound, none, COUNT, BLOCK)
    equals, last = tl.full(best.shape, 0, tl.float32), none
    for start in range(0, rows[2], BLOCK):
        tokens, logits = _tile(rows, start, BLOCK)
        equal = rank(logits) == bound[:, None]
        before = equals[:, None] + tl.cumsum(equal.to(tl.float32), axis=1) - 1
        weights = 1.0 if COUNT else tl.exp2((logits - best[:, None]) * scale[:, None])
        kept = equal & (above[:, None] + before * weights < target[:, None])
        last = tl.maximum(last, tl.max(tl.where(kept, tokens, -1), axis=1))
        equals += tl.sum(equal.to(tl.float32), axis=1)
    return bound, tl.where(bound == last_rank, tl.minimum(last, last_token), last)


@triton.jit
def _least_rank(rows, best, scale, least_weight, BLOCK: tl.constexpr):
    """The lowest rank among the tokens of rows whose weight is at least `least_weight`."""
    least = rank(best)
    for start in range(0, rows[2], BLOCK):
        _, logits = _tile(rows, start, BLOCK)
        heavy = tl.exp2((logits - best[:, None]) * scale[:, None]) >= least_weight[:, None]
        least = tl.minimum(least, tl.min(tl.where(heavy, rank(logits), 0x7FFFFFFF), axis=1))
    return least


@kernel
def _laws(
    adjusted_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    moments_ptr,
    lasts_ptr,
    num_rows,
    rows_per_request,
    vocab_size,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask, request = offs < num_rows, offs // rows_per_request
    temperature = tl.load(temperature_ptr + request, mask=mask, other=0.0)
    top_k = tl.load(top_k_ptr + request, mask=mask, other=0)
    top_p = tl.load(top_p_ptr + request, mask=mask, other=1.0).to(tl.float32)
    min_p = tl.load(min_p_ptr + request, mask=mask, other=0.0).to(tl.float32)
    rows = (adjusted_ptr + offs * vocab_size, mask, vocab_size)
    best, argmax = _best(rows, BLOCK)
    sampled = temperature > 0
    held = tl.minimum(tl.maximum(temperature, LEAST_T), MOST_T).to(tl.float32)
    scale = tl.where(sampled, tl.div_rn(tl.full((ROWS,), LOG2_E, tl.float32), held), LOG2_E)
    everything = tl.full((ROWS,), LOWEST_RANK, tl.int32), tl.full((ROWS,), vocab_size, tl.int32)
    total = _mass(rows, best, scale, everything[0], everything[1], False, BLOCK)
    last_rank, last_token = tl.where(sampled, everything[0], rank(best)), tl.where(sampled, everything[1], argmax)
    mass = tl.where(sampled, total, 1.0)

    by_count, by_mass, by_weight = (top_k > 0) & (top_k < vocab_size), top_p < 1, min_p > 0
    filtered = sampled & (by_count | by_mass | by_weight)
    if tl.max(filtered.to(tl.int32)) > 0:
        by_count, by_mass, by_weight = sampled & by_count, sampled & by_mass, sampled & by_weight
        if tl.max(by_count.to(tl.int32)) > 0:
            bound, token = _keep_before(rows, best, scale, last_rank, last_token, top_k.to(tl.float32), True, BLOCK)
            last_rank, last_token = tl.where(by_count, bound, last_rank), tl.where(by_count, token, last_token)
        if tl.max(by_mass.to(tl.int32)) > 0:
            target = _mass(rows, best, scale, last_rank, last_token, False, BLOCK) * tl.maximum(top_p, LEAST_P)
            bound, token = _keep_before(rows, best, scale, last_rank, last_token, target, False, BLOCK)
            last_rank, last_token = tl.where(by_mass, bound, last_rank), tl.where(by_mass, token, last_token)
        if tl.max(by_weight.to(tl.int32)) > 0:
            bound = _least_rank(rows, best, scale, min_p, BLOCK)
            raised = by_weight & (bound > last_rank)
            last_rank, last_token = tl.where(raised, bound, last_rank), tl.where(raised, vocab_size, last_token)
        mass = tl.where(filtered, _mass(rows, best, scale, last_rank, last_token, False, BLOCK), mass)
    tl.store(moments_ptr + offs * 4, best, mask=mask)
    tl.store(moments_ptr + offs * 4 + 1, scale, mask=mask)
    tl.store(moments_ptr + offs * 4 + 2, tl.log2(tl.where(mask, total, 1.0)), mask=mask)
    tl.store(moments_ptr + offs * 4 + 3, mass, mask=mask)
    tl.store(lasts_ptr + offs * 2, last_rank, mask=mask)
    tl.store(lasts_ptr + offs * 2 + 1, last_token, mask=mask)


@dataclass(frozen=True, slots=True)
class Law:
    """The laws of rows.

    moments: f32 [R, 4], the largest logit, log2(e) / T (T = 1 when greedy), log2 of the sum of all weights, and the sum
    of those kept. lasts: i32 [R, 2], rank and token of the last that is kept.
    """

    moments: torch.Tensor
    lasts: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device | str) -> Self:
        moments = torch.empty(num_rows, 4, dtype=torch.float32, device=device)
        return cls(moments, torch.empty(num_rows, 2, dtype=torch.int32, device=device))


def laws(batch: Batch, adjusted_RV: torch.Tensor, rows_per_request: int, out: Law | None = None) -> Law:
    """The law of every row of adjusted f32 logits: temperature, top-k, top-p and min-p in one launch."""
    require_contiguous(adjusted=adjusted_RV)
    (num_rows, vocab_size), sampling = adjusted_RV.shape, batch.sampling
    law = Law.empty(num_rows, adjusted_RV.device) if out is None else out
    block = vocab_block(vocab_size)
    rows = min(block_of(num_rows, on_gpu=1), max(1, 2**18 // block))
    _laws[(triton.cdiv(num_rows, rows),)](
        adjusted_RV,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        law.moments,
        law.lasts,
        num_rows,
        rows_per_request,
        vocab_size,
        ROWS=rows,
        BLOCK=block,
    )
    return law


# Device functions know laws by the tuple (adjusted_ptr, moments_ptr, lasts_ptr, vocab_size).


@triton.jit
def weight(laws, row, tokens):
    """Weights of tokens at a row: their probabilities times kept_mass."""
    adjusted_ptr, moments_ptr, lasts_ptr, vocab_size = laws
    mask = (tokens >= 0) & (tokens < vocab_size)
    logits = tl.load(adjusted_ptr + row * vocab_size + tokens, mask=mask, other=float("-inf"))
    best, scale = tl.load(moments_ptr + row * 4), tl.load(moments_ptr + row * 4 + 1)
    last_rank, last_token = tl.load(lasts_ptr + row * 2), tl.load(lasts_ptr + row * 2 + 1)
    ranks = rank(logits)
    kept = (ranks > last_rank) | ((ranks == last_rank) & (tokens <= last_token))
    return tl.where(kept, tl.exp2((logits - best) * scale), 0.0)


@triton.jit
def kept_mass(laws, row):
    """The sum of a row's weights."""
    return tl.load(laws[1] + row * 4 + 3)


@triton.jit
def only_token(laws, row):
    """The one token that a row of temperature 0 keeps."""
    return tl.load(laws[2] + row * 2 + 1)


@triton.jit
def logprob(laws, rows, tokens, mask):
    """log softmax(adjusted / T) of tokens at rows, T = 1 when greedy, before filters; 0 where masked or no token."""
    adjusted_ptr, moments_ptr, _, vocab_size = laws
    mask &= (tokens >= 0) & (tokens < vocab_size)
    logits = tl.load(adjusted_ptr + rows * vocab_size + tokens, mask=mask, other=0.0)
    best = tl.load(moments_ptr + rows * 4, mask=mask, other=0.0)
    scale = tl.load(moments_ptr + rows * 4 + 1, mask=mask, other=0.0)
    log_sum = tl.load(moments_ptr + rows * 4 + 2, mask=mask, other=0.0)
    return tl.where(mask, ((logits - best) * scale - log_sum) * LN_2, 0.0)


@triton.jit
def _residual(laws, row, siblings, start, before, BLOCK: tl.constexpr):
    """(tokens, weights, cdf) of a tile; `before` is the cdf so far."""
    tokens = start + tl.arange(0, BLOCK)
    weights = weight(laws, row, tokens)
    if siblings is not None:
        tokens_ptr, next_sibling_ptr, node, num_nodes = siblings
        seen = 0
        while (node >= 0) & (node < num_nodes) & (seen < num_nodes):
            weights = tl.where(tokens == tl.load(tokens_ptr + node), 0.0, weights)
            node, seen = tl.load(next_sibling_ptr + node), seen + 1
    return tokens, weights, before + tl.cumsum(weights, axis=0)


@triton.jit
def _total(laws, row, siblings, BLOCK: tl.constexpr):
    """The last of the residual's cdf."""
    total = tl.full((), 0, tl.float32)
    for start in range(0, laws[3], BLOCK):
        _, _, cdf = _residual(laws, row, siblings, start, total, BLOCK)
        total = tl.max(cdf, axis=0)
    return total


@triton.jit
def draw(laws, row, siblings, uniform, BLOCK: tl.constexpr):
    """The first token with weight and cdf > uniform · cdf[last], under a row's law without the rejected siblings.

    siblings: (tokens_ptr, next_sibling_ptr, first node of the rejected or -1, num_nodes), or None where there is no
    tree. Where they leave nothing the law is taken whole.
    """
    total = _total(laws, row, siblings, BLOCK)
    if siblings is not None:
        tokens_ptr, next_sibling_ptr, first, num_nodes = siblings
        siblings = (tokens_ptr, next_sibling_ptr, tl.where(total > 0, first, -1), num_nodes)
        if total == 0:
            total = _total(laws, row, siblings, BLOCK)
    bound, before = uniform * total, tl.full((), 0, tl.float32)
    found, last, start = laws[3], -1, 0
    while (start < laws[3]) & (found == laws[3]):
        tokens, weights, cdf = _residual(laws, row, siblings, start, before, BLOCK)
        found = tl.min(tl.where((weights > 0) & (cdf > bound), tokens, laws[3]), axis=0)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, tokens, -1), axis=0))
        before, start = tl.max(cdf, axis=0), start + BLOCK
    return tl.where(found < laws[3], found, last)  # a parallel scan may have its peak where there is no weight
