"""Prompt lookup on the device: chains of n-gram drafts for a whole batch, which every graph mode captures."""

from typing import NamedTuple, Self, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, DraftInput, ExplicitCandidates
from specsim.core.pool import KVPool
from specsim.core.token_drafter import NgramConfig
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers
from specsim.fast.runtime.launch import await_input, block_of, kernel, next_power_of_2, require_contiguous

_POSITIONS = 2048


class Lookup(NamedTuple):
    """Chains of drafts; the first `num_alive` of a request exist, the others are token 0."""

    tokens: torch.Tensor  # i64 [B, S]
    num_alive: torch.Tensor  # i32 [B]

    @classmethod
    def empty(cls, batch_size: int, num_steps: int, device: torch.device | str) -> "Lookup":
        """Allocate buffers, which `prompt_lookup` fills."""
        tokens = torch.empty(batch_size, num_steps, dtype=torch.int64, device=device)
        return cls(tokens, torch.empty(batch_size, dtype=torch.int32, device=device))


@kernel
@no_type_check
def _lookup_kernel(
    token_ids_ptr,
    req_pool_indices_ptr,
    num_tokens_ptr,
    out_ptrs,
    num_columns,
    num_steps,
    min_ngram,
    max_ngram,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compare the last tokens of one request with those before every earlier position."""
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(req_pool_indices_ptr + request).to(tl.int64)
    length = tl.load(num_tokens_ptr + request, mask=row >= 0, other=0).to(tl.int64)
    row_ptr = token_ids_ptr + row * num_columns
    best = tl.zeros((), tl.int64)  # longest n-gram in the upper half, and the less its end, the more in the lower one
    for start in range(0, length - 1, BLOCK):
        ends = start + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK], last tokens of earlier n-grams
        matches = ends < length - 1
        ngram = tl.zeros((BLOCK,), tl.int64)
        for back in range(max_ngram):
            last = tl.load(row_ptr + length - 1 - back, mask=back < length, other=-1)
            mask = matches & (ends >= back)
            matches = mask & (tl.load(row_ptr + ends - back, mask=mask, other=-1) == last)
            ngram += matches.to(tl.int64)
        rank = (ngram << 32) + (0x7FFFFFFF - ends)
        best = tl.maximum(best, tl.max(tl.where(ngram >= min_ngram, rank, 0), 0))
    end = 0x7FFFFFFF - (best & 0x7FFFFFFF)
    alive = tl.where(best > 0, tl.minimum(num_steps, length - 1 - end), 0)
    steps = tl.arange(0, STEPS)
    drafts = tl.load(row_ptr + end + 1 + steps, mask=steps < alive, other=0)
    tl.store(out_ptrs.tokens + request * num_steps + steps, drafts.to(tl.int64), mask=steps < num_steps)
    tl.store(out_ptrs.num_alive + request, alive.to(tl.int32))


def prompt_lookup(
    token_ids: torch.Tensor,
    req_pool_indices: torch.Tensor,
    num_tokens: torch.Tensor,
    config: NgramConfig,
    num_steps: int,
    *,
    out: Lookup | None = None,
) -> Lookup:
    """Propose what follows the first occurrence of each request's longest n-gram, as `Ngram` does for topk 1.

    token_ids: int [requests, columns], whose row req_pool_indices[b] holds num_tokens[b] tokens of request b; the last
    one is the root. A padded request (row -1) has no draft. One program reads a request's tokens max_ngram times.
    """
    require_contiguous(token_ids=token_ids, req_pool_indices=req_pool_indices, num_tokens=num_tokens)
    batch_size = len(req_pool_indices)
    lookup = out or Lookup.empty(batch_size, num_steps, token_ids.device)
    _lookup_kernel[(batch_size,)](
        token_ids_ptr=token_ids,
        req_pool_indices_ptr=req_pool_indices,
        num_tokens_ptr=num_tokens,
        out_ptrs=lookup,
        num_columns=token_ids.shape[1],
        num_steps=num_steps,
        min_ngram=config.min_ngram,
        max_ngram=config.max_ngram,
        STEPS=next_power_of_2(max(num_steps, 1)),
        BLOCK=block_of(token_ids.shape[1], _POSITIONS),
    )
    return lookup


class LookupChainDrafter(StepDrafter):
    """A drafter that looks up each request's last tokens on the device, and keeps the root only."""

    def __init__(self, ngram: NgramConfig, config: SpecConfig, device: torch.device) -> None:
        self._ngram = ngram
        self._num_steps = config.num_steps
        self._device = device

    def buffers(self, size: int) -> CandidateBuffers:
        """Make the candidates of padded requests, whose parents and scores no round changes."""
        none = ExplicitCandidates.empty(size, self._num_steps)
        none.parents.copy_(torch.arange(-1, self._num_steps - 1))
        none.scores.fill_(1.0)
        return CandidateBuffers(none)

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        """Look up every request's drafts, and leave them in the buffers."""
        lookup = Lookup(buffers.explicit.tokens, buffers.explicit.num_alive)
        prompt_lookup(
            pools.token_ids, batch.req_pool_indices, batch.seq_lens + 1, self._ngram, self._num_steps, out=lookup
        )

    def with_config(self, config: SpecConfig) -> Self:
        return type(self)(self._ngram, config, self._device)
