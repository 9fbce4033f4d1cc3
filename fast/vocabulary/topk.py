"""The k best tokens of a row and their scores, from the largest logit of every token group.

All selections rank a 64-bit key: the value above the index counted down. So no two keys are equal, and of equal values
the lower index has the larger key. NaN ranks above every number, so that padding is ordered too. A value in bf16 and an
index below 2^16 fit into a short key of 32 bits, which is selected in a third of the instructions.
"""

import math
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import Score
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.vocabulary.summaries import GROUP, LOG2_E, summarise, weights_of

TAKEN = tl.constexpr(-0x8000000000000000)  # below every key
SHORT_TAKEN = tl.constexpr(-0x80000000)  # below every short key


class Best(NamedTuple):
    """Best tokens of R rows, as kernel arguments."""

    scores_ptr: torch.Tensor  # f32 [R, K], each token's probability or its logarithm
    index_ptr: torch.Tensor  # i64 [R, K], target ids

    @classmethod
    def empty(cls, num_rows: int, k: int, device: torch.device) -> Self:
        scores = torch.empty(num_rows, k, dtype=torch.float32, device=device)
        return cls(scores, torch.empty_like(scores, dtype=torch.int64))


@triton.jit
@no_type_check
def ordered(values):
    """Map f32 values to i32 in the same order, with -0 equal to 0 and NaN the largest."""
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(values != values, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
@no_type_check
def key_of(values, index):
    """Make the key of a value at an index."""
    return (ordered(values).to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
@no_type_check
def unordered(ranks):
    """Map a rank to its f32."""
    return tl.where(ranks < 0, ranks ^ 0x7FFFFFFF, ranks).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def value_of(key):
    """Extract the value of a key."""
    return unordered((key >> 32).to(tl.int32))


@triton.jit
@no_type_check
def index_of(key):
    """Extract the index of a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF)


@triton.jit
@no_type_check
def best_of(keys, k, PLACES: tl.constexpr):
    """Select the k largest keys of each row, long or short, largest first, [ROWS, PLACES]."""
    used_key: tl.constexpr = SHORT_TAKEN if keys.dtype == tl.int32 else TAKEN
    rank = tl.arange(0, PLACES)[None, :]
    best = tl.full([keys.shape[0], PLACES], used_key, keys.dtype)
    for count in range(k):
        largest = tl.max(keys, axis=1, keep_dims=True)
        best = tl.where(rank == count, largest, best)
        keys = tl.where(keys == largest, used_key, keys)
    return best


@triton.jit
@no_type_check
def _short_key_of(values, index):
    """Make the short key of a value in bf16 at an index."""
    return (ordered(values) & -0x10000) | (0xFFFF - index)


@triton.jit
@no_type_check
def _best_in_short(
    logits_ptr, rows, live, maxima, mask, first_token, num_tokens, k, GROUP: tl.constexpr, PLACES: tl.constexpr
):
    """Do the same as best_tokens by short keys.

    A token's index is its place in the chosen groups, which are numbered in the order of their tokens.
    """
    groups = tl.arange(0, maxima.shape[1])[None, :]
    chosen = best_of(tl.where(mask, _short_key_of(maxima, groups), SHORT_TAKEN), k, PLACES)
    chosen = 0xFFFF - (chosen & 0xFFFF)  # [ROWS, PLACES]
    number = tl.sum((chosen[:, None, :] < chosen[:, :, None]).to(tl.int32), axis=2)
    offs = tl.arange(0, GROUP)[None, None, :]
    tokens = chosen[:, :, None] * GROUP + offs  # [ROWS, PLACES, GROUP]
    mask = live[:, :, None] & (tokens < num_tokens)
    logits = tl.load(logits_ptr + rows[:, :, None] * num_tokens + tokens, mask=mask, other=0.0).to(tl.float32)
    keys = tl.where(mask, _short_key_of(logits, number[:, :, None] * GROUP + offs), SHORT_TAKEN)
    best = best_of(tl.reshape(keys, (keys.shape[0], PLACES * GROUP)), k, PLACES)
    index = 0xFFFF - (best & 0xFFFF)  # [ROWS, PLACES]
    is_group = number[:, None, :] == (index // GROUP)[:, :, None]
    token = tl.sum(tl.where(is_group, chosen[:, None, :], 0), axis=2) * GROUP + index % GROUP + first_token
    return key_of(unordered(tl.where(best < 0, best | 0xFFFF, best & -0x10000)), token)


@triton.jit
@no_type_check
def largest_of(maxima, mask):
    """Find the largest of each row's maxima, NaN where there is one, [ROWS, 1]."""
    return unordered(tl.max(tl.where(mask, ordered(maxima), SHORT_TAKEN), axis=1, keep_dims=True))


@triton.jit
@no_type_check
def rows_of(slots_ptr, num_rows, ROWS: tl.constexpr):
    """Number this program's rows, [ROWS, 1]: (rows, whether they exist, whether they are not dropped)."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    mask_rows = rows < num_rows
    live = mask_rows
    if slots_ptr is not None:
        live = tl.load(slots_ptr + rows, mask=mask_rows, other=-1) >= 0
    return rows, mask_rows, live


@triton.jit
@no_type_check
def best_tokens(
    logits_ptr, rows, live, maxima, mask, first_token, num_tokens, k, GROUP: tl.constexpr, PLACES: tl.constexpr
):
    """Select the keys of the k best tokens of each row among its k best groups, largest first, [ROWS, PLACES].

    No other group has a token better than each of these groups' largest. maxima: of groups, [ROWS, GROUPS]. mask: which
    of them there are. first_token: id of the first of the row's num_tokens logits.
    """
    size: tl.constexpr = maxima.shape[1]
    if logits_ptr.dtype.element_ty == tl.bfloat16 and size < 0x10000 and PLACES * GROUP <= 0x10000:
        best = _best_in_short(logits_ptr, rows, live, maxima, mask, first_token, num_tokens, k, GROUP, PLACES)
    else:
        chosen = best_of(tl.where(mask, key_of(maxima, tl.arange(0, size)[None, :]), TAKEN), k, PLACES)
        tokens = index_of(chosen)[:, :, None] * GROUP + tl.arange(0, GROUP)[None, None, :]  # [ROWS, PLACES, GROUP]
        mask = (live & (chosen != TAKEN))[:, :, None] & (tokens < num_tokens)
        logits = tl.load(logits_ptr + rows[:, :, None] * num_tokens + tokens, mask=mask, other=0.0).to(tl.float32)
        keys = tl.where(mask, key_of(logits, tokens + first_token), TAKEN)
        best = best_of(tl.reshape(keys, (keys.shape[0], PLACES * GROUP)), k, PLACES)
    return best


@triton.jit
@no_type_check
def store_drafts(out_ptrs, d2t_ptr, rows, mask_rows, live, best, largest, total, k, LOG: tl.constexpr):
    """Store scores and target ids of the k best tokens of each row; a dropped row proposes ids 0..k-1.

    best: keys [ROWS, PLACES]. largest, total: the largest logit and the sum of all weights, [ROWS, 1].
    """
    rank = tl.arange(0, best.shape[1])[None, :]
    mask = mask_rows & (rank < k)
    target_ids = index_of(best)
    if d2t_ptr is not None:
        target_ids += tl.load(d2t_ptr + target_ids, mask=mask & live, other=0)
    below = value_of(best) - largest
    total = tl.where(live, total, 1.0)
    scores = below - tl.log(total) if LOG else tl.exp2(below * LOG2_E) / total
    tl.store(out_ptrs.scores_ptr + rows * k + rank, tl.where(live, scores, -float("inf") if LOG else 0.0), mask=mask)
    tl.store(out_ptrs.index_ptr + rows * k + rank, tl.where(live, target_ids, rank), mask=mask)


@kernel
@no_type_check
def _topk(
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    d2t_ptr,
    slots_ptr,
    out_ptrs,
    num_rows,
    vocab_size,
    num_groups,
    k,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the k best tokens of some rows."""
    await_input(PDL)
    rows, mask_rows, live = rows_of(slots_ptr, num_rows, ROWS)
    groups = tl.arange(0, GROUPS)[None, :]
    mask = mask_rows & (groups < num_groups)
    maxima = tl.load(maxima_ptr + rows * num_groups + groups, mask=mask, other=-float("inf"))
    sums = tl.load(sums_ptr + rows * num_groups + groups, mask=mask, other=0.0)
    largest = largest_of(maxima, mask)
    total = tl.sum(sums * weights_of(maxima, largest, LOG2_E), axis=1, keep_dims=True)
    best = best_tokens(logits_ptr, rows, live, maxima, mask, 0, vocab_size, k, GROUP, PLACES)
    store_drafts(out_ptrs, d2t_ptr, rows, mask_rows, live, best, largest, total, k, LOG)


def group_size(vocab_size: int, k: int) -> int:
    """Choose the tokens of a group, so that about as many are read again as there are groups."""
    return next_power_of_2(max(16, min(GROUP, math.isqrt(vocab_size // next_power_of_2(k)))))


def draft_topk(
    logits_RV: torch.Tensor,
    k: int,
    d2t: torch.Tensor | None,
    slots_R: torch.Tensor | None = None,
    score: Score = "prob",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the k best drafts of each row: (scores f32, target ids i64), [R, K].

    Fused in one pass over the logits: selection, (log-)softmax and the map to target ids. A row whose slot is -1
    proposes ids 0..K-1 with probability 0, whose logarithm is -inf.
    """
    (num_rows, vocab_size) = logits_RV.shape
    device = logits_RV.device
    if k > vocab_size:
        raise ValueError(f"topk is {k}, more than the {vocab_size} ids of the draft vocabulary")
    require_contiguous(logits_RV=logits_RV, d2t=d2t, slots_R=slots_R)
    places = next_power_of_2(k)
    group = group_size(vocab_size, k)
    maxima, sums = summarise(logits_RV, marks_B=slots_R, group=group)
    num_groups = maxima.shape[1]
    best = Best(*out) if out else Best.empty(num_rows, k, device)
    groups = next_power_of_2(num_groups)
    rows = block_of(num_rows, 1, max(groups, places * group))
    _topk[(ceil_div(num_rows, rows),)](
        logits_ptr=logits_RV,
        maxima_ptr=maxima,
        sums_ptr=sums,
        d2t_ptr=d2t,
        slots_ptr=slots_R,
        out_ptrs=best,
        num_rows=num_rows,
        vocab_size=vocab_size,
        num_groups=num_groups,
        k=k,
        LOG=score == "logprob",
        ROWS=rows,
        GROUPS=groups,
        GROUP=group,
        PLACES=places,
        num_warps=1 if places * group <= 2048 else 8,
    )
    return best.scores_ptr, best.index_ptr
