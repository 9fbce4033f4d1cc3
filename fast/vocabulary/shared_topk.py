"""The k best tokens of a row whose vocabulary ranks share: each sends its k best and its groups' summaries.

Groups are those of specsim.fast.vocabulary.topk, in the same order, so tokens and scores are the same as of whole rows.
"""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.config import Score
from specsim.core.rank_group import RankGroup
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel, next_power_of_2, require_contiguous
from specsim.fast.runtime.peer_memory import gather
from specsim.fast.vocabulary.summaries import LOG2_E, summarise, weights_of
from specsim.fast.vocabulary.topk import (
    TAKEN,
    Best,
    best_of,
    best_tokens,
    group_size,
    largest_of,
    rows_of,
    store_drafts,
)


@kernel
@no_type_check
def _keys_kernel(
    logits_ptr,
    maxima_ptr,
    slots_ptr,
    keys_ptr,
    first_token,
    num_rows,
    num_tokens,
    num_groups,
    k,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the k best of a slice, as keys of their ids in the whole vocabulary."""
    await_input(PDL)
    rows, mask_rows, live = rows_of(slots_ptr, num_rows, ROWS)
    rank = tl.arange(0, PLACES)[None, :]
    groups = tl.arange(0, GROUPS)[None, :]
    mask = mask_rows & (groups < num_groups)
    maxima = tl.load(maxima_ptr + rows * num_groups + groups, mask=mask, other=-float("inf"))
    best = best_tokens(logits_ptr, rows, live, maxima, mask, first_token, num_tokens, k, GROUP, PLACES)
    tl.store(keys_ptr + rows * k + rank, best, mask=mask_rows & (rank < k))


@kernel
@no_type_check
def _merge_kernel(
    keys_ptr,
    maxima_ptr,
    sums_ptr,
    d2t_ptr,
    slots_ptr,
    out_ptrs,
    num_rows,
    num_groups,
    groups_per_rank,
    num_keys,
    k,
    LOG: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    PLACES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the k best of all ranks' keys, and compute their scores from all groups."""
    await_input(PDL)
    rows, mask_rows, live = rows_of(slots_ptr, num_rows, ROWS)
    groups = tl.arange(0, GROUPS)[None, :]
    entry = tl.arange(0, KEYS)[None, :]
    mask = mask_rows & (groups < num_groups)
    address = (groups // groups_per_rank * num_rows + rows) * groups_per_rank + groups % groups_per_rank
    maxima = tl.load(maxima_ptr + address, mask=mask, other=-float("inf"))  # [ROWS, GROUPS]
    sums = tl.load(sums_ptr + address, mask=mask, other=0.0)
    largest = largest_of(maxima, mask)
    total = tl.sum(sums * weights_of(maxima, largest, LOG2_E), axis=1, keep_dims=True)
    mask = mask_rows & (entry < num_keys)
    keys = tl.load(keys_ptr + (entry // k * num_rows + rows) * k + entry % k, mask=mask, other=TAKEN)  # [ROWS, KEYS]
    best = best_of(keys, k, PLACES)
    store_drafts(out_ptrs, d2t_ptr, rows, mask_rows, live, best, largest, total, k, LOG)


def can_share(ranks: RankGroup, vocab_size: int, k: int) -> bool:
    """Check whether every rank's slice of a vocabulary begins with a group."""
    return ranks.part.chunk(vocab_size) % group_size(vocab_size, k) == 0


def shared_topk(
    ranks: RankGroup,
    logits_RC: torch.Tensor,
    vocab_size: int,
    k: int,
    d2t: torch.Tensor | None,
    slots_R: torch.Tensor | None = None,
    score: Score = "prob",
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the k best drafts of each row, as draft_topk does, from this rank's slice of the logits.

    logits_RC: -inf beyond the rank's tokens.
    """
    num_rows, chunk = logits_RC.shape
    device = logits_RC.device
    require_contiguous(logits_RC=logits_RC, d2t=d2t, slots_R=slots_R)
    group = group_size(vocab_size, k)
    maxima, sums = summarise(logits_RC, marks_B=slots_R, group=group)
    own_groups = maxima.shape[1]
    places = next_power_of_2(k)
    keys = torch.empty(num_rows, k, dtype=torch.int64, device=device)
    groups = next_power_of_2(own_groups)
    rows = block_of(num_rows, 1, max(groups, places * group))
    num_warps = 1 if places * group <= 2048 else 8
    _keys_kernel[(ceil_div(num_rows, rows),)](
        logits_ptr=logits_RC,
        maxima_ptr=maxima,
        slots_ptr=slots_R,
        keys_ptr=keys,
        first_token=ranks.rank * chunk,
        num_rows=num_rows,
        num_tokens=chunk,
        num_groups=own_groups,
        k=k,
        ROWS=rows,
        GROUPS=groups,
        GROUP=group,
        PLACES=places,
        num_warps=num_warps,
    )
    every = gather(ranks, keys)
    summaries = gather(ranks, torch.stack([maxima, sums]))  # [ranks, 2, R, groups of a rank]
    best = Best(*out) if out else Best.empty(num_rows, k, device)
    num_groups = ceil_div(vocab_size, group)
    groups = next_power_of_2(num_groups)
    rows = block_of(num_rows, 1, max(groups, places * ranks.size))
    _merge_kernel[(ceil_div(num_rows, rows),)](
        keys_ptr=every,
        maxima_ptr=summaries[:, 0].contiguous(),
        sums_ptr=summaries[:, 1].contiguous(),
        d2t_ptr=d2t,
        slots_ptr=slots_R,
        out_ptrs=best,
        num_rows=num_rows,
        num_groups=num_groups,
        groups_per_rank=own_groups,
        num_keys=ranks.size * k,
        k=k,
        LOG=score == "logprob",
        ROWS=rows,
        GROUPS=groups,
        KEYS=next_power_of_2(ranks.size * k),
        PLACES=places,
        num_warps=num_warps,
    )
    return best.scores_ptr, best.index_ptr
