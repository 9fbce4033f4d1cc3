"""Verification with a vocabulary that ranks share: every rank fetches the groups of tokens that its walks read.

Groups are those of specsim.fast.vocabulary.summaries, in the same order, so results are the same as of whole rows.
"""

from dataclasses import dataclass
from typing import Self, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.pool import KVPool
from specsim.core.rank_group import RankGroup
from specsim.core.verifiers import DEFAULT_VERIFIER
from specsim.fast.acceptance import LinkTables, PathTables, accept, finish
from specsim.fast.runtime.launch import await_input, kernel, require_contiguous
from specsim.fast.runtime.peer_memory import gather
from specsim.fast.runtime.uniforms import FINAL
from specsim.fast.sampling import summarised_distributions
from specsim.fast.vocabulary.distribution import (
    PER,
    Distributions,
    Requests,
    Siblings,
    Workspace,
    drawn_group,
    groups_block,
    uniform_of,
)  # fmt: skip
from specsim.fast.vocabulary.penalties import adjust_logits
from specsim.fast.vocabulary.summaries import GROUP, num_groups, summarise


@kernel
@no_type_check
def _pick_kernel(own_ptr, rows_ptr, groups_ptr, out_ptr, first_group, chunk, GROUP: tl.constexpr, PDL: tl.constexpr):
    """Copy one wanted group from this rank's slice, where it has it."""
    await_input(PDL)
    query = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, GROUP)
    local = tl.load(groups_ptr + query) - first_group
    is_own = (local >= 0) & (local < chunk // GROUP)
    address = tl.load(rows_ptr + query) * chunk + local * GROUP + offs
    values = tl.load(own_ptr + address, mask=is_own & (offs >= 0), other=0.0)
    tl.store(out_ptr + query * GROUP + offs, values)


@kernel
@no_type_check
def _place_kernel(
    parts_ptr,
    rows_ptr,
    groups_ptr,
    table_ptr,
    groups_per_rank,
    vocab_size,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy one wanted group from the rank that has it to its place in the row."""
    await_input(PDL)
    query = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0)
    offs = tl.arange(0, GROUP)
    group = tl.load(groups_ptr + query)
    owner = tl.maximum(group, 0) // groups_per_rank
    values = tl.load(parts_ptr + (owner * count + query) * GROUP + offs)
    tokens = group * GROUP + offs
    mask = (group >= 0) & (tokens < vocab_size)
    tl.store(table_ptr + tl.load(rows_ptr + query) * vocab_size + tokens, values, mask=mask)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """This rank's slice of rows, and the groups that were fetched of the others' slices."""

    ranks: RankGroup
    slice_RC: torch.Tensor  # [R, chunk], -inf beyond the rank's tokens
    table: torch.Tensor  # [R, V], unwritten where nothing was fetched

    @classmethod
    def of(cls, ranks: RankGroup, own_RC: torch.Tensor, vocab_size: int) -> Self:
        """Make the rows of this rank's slice."""
        require_contiguous(own_RC=own_RC)
        tokens = ranks.part.tokens(vocab_size)
        table = own_RC.new_empty(len(own_RC), vocab_size)
        table[:, tokens.start : tokens.stop].copy_(own_RC[:, : len(tokens)])
        return cls(ranks, own_RC, table)

    def summaries(self, batch: Batch, changed_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Summarise all groups of every row, as `summarise` does of whole rows."""
        local = torch.stack(summarise(self.slice_RC, batch.sampling.temperature, changed_B))  # [2, R, groups of a rank]
        count = num_groups(self.table.shape[1])
        maxima, sums = gather(self.ranks, local).permute(1, 2, 0, 3).flatten(2)[..., :count].contiguous()
        return maxima, sums

    def fetch(self, rows_Q: torch.Tensor, groups_Q: torch.Tensor) -> None:
        """Copy groups of rows to the table from the ranks that have them; group -1 is none."""
        require_contiguous(rows_Q=rows_Q, groups_Q=groups_Q)
        chunk = self.slice_RC.shape[1]
        wanted = (len(rows_Q),)
        picked = self.slice_RC.new_empty(len(rows_Q), GROUP)
        _pick_kernel[wanted](
            own_ptr=self.slice_RC,
            rows_ptr=rows_Q,
            groups_ptr=groups_Q,
            out_ptr=picked,
            first_group=self.ranks.rank * (chunk // GROUP),
            chunk=chunk,
            GROUP=GROUP,
        )
        _place_kernel[wanted](
            parts_ptr=gather(self.ranks, picked),
            rows_ptr=rows_Q,
            groups_ptr=groups_Q,
            table_ptr=self.table,
            groups_per_rank=chunk // GROUP,
            vocab_size=self.table.shape[1],
            GROUP=GROUP,
        )


def best_groups(maxima_RG: torch.Tensor) -> torch.Tensor:
    """Find the first group with the largest logit of each row, i64 [R]."""
    groups = torch.arange(maxima_RG.shape[1], device=maxima_RG.device)
    best = maxima_RG.amax(1, keepdim=True)
    return torch.where(maxima_RG == best, groups, maxima_RG.shape[1] - 1).amin(1)


@kernel
@no_type_check
def _bonus_group_kernel(
    distributions,
    workspace,
    link_ptrs,
    rejected_ptr,
    requests,
    path_ptrs,
    rows_ptr,
    groups_ptr,
    num_nodes,
    num_steps,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the row from which one request's bonus token is drawn, and the token's group, -1 where none is drawn."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    drafts = tl.load(path_ptrs.num_drafts_ptr + request)
    uniform = uniform_of(requests, request, FINAL, length, tl.full((), 0, tl.int32))
    node = tl.load(path_ptrs.accept_index_ptr + request * (num_steps + 1) + drafts, mask=length > 0, other=0)
    last = tl.maximum(node, 0).to(tl.int64)
    first = tl.load(rejected_ptr + request)
    siblings = Siblings(link_ptrs.tokens_ptr + root, link_ptrs.next_sibling_ptr + root, first, num_nodes)
    chosen = tl.full((), -1, tl.int64)
    if (length > 0) & (tl.load(requests.temperature_ptr + request) > 0):
        group, _, _, _ = drawn_group(distributions, last, siblings, uniform, workspace, request, GROUP, GROUPS, PER)
        chosen = group.to(tl.int64)
    tl.store(rows_ptr + request, last)
    tl.store(groups_ptr + request, chosen)


def bonus_groups(
    batch: Batch,
    verify_input: VerifyInput,
    distributions: Distributions,
    config: SpecConfig,
    verdict: Verdict,
    rejected_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the row and the group of tokens that each bonus token is drawn from, i64 [B].

    The group of a greedy request is -1.
    """
    num_requests = len(rejected_B)
    rows, groups = torch.empty(2, num_requests, dtype=torch.int64, device=rejected_B.device)
    _bonus_group_kernel[(num_requests,)](
        distributions=distributions.tables,
        workspace=Workspace.of(distributions, num_requests),
        link_ptrs=LinkTables.of(verify_input),
        rejected_ptr=rejected_B,
        requests=Requests.of(batch),
        path_ptrs=PathTables.of(verdict),
        rows_ptr=rows,
        groups_ptr=groups,
        num_nodes=config.num_draft_tokens,
        num_steps=config.num_steps,
        GROUP=GROUP,
        GROUPS=groups_block(distributions.logits.raw.shape[1]),
        PER=PER,
    )
    return rows, groups


def can_share(ranks: RankGroup, vocab_size: int, config: SpecConfig) -> bool:
    """Check whether the verifier is the one that reads few tokens of a row, and slices begin with a group."""
    return config.verifier == DEFAULT_VERIFIER and ranks.part.chunk(vocab_size) % GROUP == 0


def needs_all(batch: Batch, vocab_size: int) -> bool:
    """Check on the host whether a request has a filter, penalty or bias, which may depend on every token."""
    sampling = batch.sampling
    changes = (
        (sampling.top_k > 0) & (sampling.top_k < vocab_size),
        sampling.top_p < 1,
        sampling.min_p > 0,
        sampling.repetition_penalty != 1,
        sampling.presence_penalty != 0,
        sampling.frequency_penalty != 0,
        sampling.is_biased,
    )
    return bool(torch.stack(changes).any())


def verify_shared(
    ranks: RankGroup,
    batch: Batch,
    verify_input: VerifyInput,
    own_RC: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    vocab_size: int,
    out: Verdict,
) -> None:
    """Verify every tree with this rank's slice of the target's logits, with the result of `verify` of whole rows.

    Fetched are each row's best group, the groups of every node's token at its parent, and those of the bonus tokens.
    Requests have no filters, penalties or biases.
    """
    rows = SharedRows.of(ranks, own_RC, vocab_size)
    logits = adjust_logits(batch, rows.table, pools, None, 0)
    summaries = rows.summaries(batch, logits.changed)
    rows.fetch(*_wanted(verify_input, summaries[0]))
    results = summarised_distributions(batch, logits, summaries)
    rejected_B = torch.empty_like(batch.seq_lens)
    accept(batch, verify_input, results, None, config, out, rejected_B)
    rows.fetch(*bonus_groups(batch, verify_input, results, config, out, rejected_B))
    finish(batch, verify_input, results, None, None, config, out, rejected_B)


def _wanted(verify_input: VerifyInput, maxima_RG: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """List (rows, groups): the best group of every row, and the group of every node's token at the node's parent."""
    parents_BN = verify_input.parents
    size, num_nodes = parents_BN.shape
    first_B1 = torch.arange(size, device=parents_BN.device)[:, None] * num_nodes
    of_nodes = (parents_BN + first_B1).clamp_min(0).flatten()
    groups_BN = torch.where(parents_BN >= 0, verify_input.draft_tokens // GROUP, -1)
    every = torch.arange(len(maxima_RG), device=parents_BN.device)
    return torch.cat([every, of_nodes]), torch.cat([best_groups(maxima_RG), groups_BN.flatten()])
