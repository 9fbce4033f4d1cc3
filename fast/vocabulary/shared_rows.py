"""Rows of logits whose vocabulary ranks share: summaries of all groups, and the few groups that a round reads again.

Groups are those of specsim.fast.vocabulary.summaries, in the same order, so whatever is computed from them is the same
as of whole rows.
"""

from dataclasses import dataclass
from typing import Self, no_type_check

import torch
import triton.language as tl

from specsim.core.phases import Batch
from specsim.core.rank_group import RankGroup
from specsim.fast.runtime.gather import gather
from specsim.fast.runtime.launch import await_input, kernel, require_contiguous
from specsim.fast.vocabulary.summaries import GROUP, num_groups, summarise


@kernel
@no_type_check
def _pick_kernel(own_ptr, rows_ptr, groups_ptr, out_ptr, first_group, chunk, GROUP: tl.constexpr, PDL: tl.constexpr):
    """Copy one wanted group from this rank's slice, where it has it."""
    await_input(PDL)
    place = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, GROUP)
    local = tl.load(groups_ptr + place) - first_group
    is_own = (local >= 0) & (local < chunk // GROUP)
    address = tl.load(rows_ptr + place) * chunk + local * GROUP + offs
    values = tl.load(own_ptr + address, mask=is_own & (offs >= 0), other=0.0)
    tl.store(out_ptr + place * GROUP + offs, values)


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
    place = tl.program_id(0).to(tl.int64)
    count = tl.num_programs(0)
    offs = tl.arange(0, GROUP)
    group = tl.load(groups_ptr + place)
    owner = tl.maximum(group, 0) // groups_per_rank
    values = tl.load(parts_ptr + (owner * count + place) * GROUP + offs)
    tokens = group * GROUP + offs
    mask = (group >= 0) & (tokens < vocab_size)
    tl.store(table_ptr + tl.load(rows_ptr + place) * vocab_size + tokens, values, mask=mask)


@dataclass(frozen=True, slots=True)
class SharedRows:
    """This rank's slice of rows, and the groups that were fetched of the others' slices."""

    ranks: RankGroup
    own: torch.Tensor  # [R, chunk], -inf beyond the rank's tokens
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
        own = torch.stack(summarise(self.own, batch.sampling.temperature, changed_B))  # [2, R, groups of a rank]
        count = num_groups(self.table.shape[1])
        maxima, sums = gather(self.ranks, own).permute(1, 2, 0, 3).flatten(2)[..., :count].contiguous()
        return maxima, sums

    def fetch(self, rows_Q: torch.Tensor, groups_Q: torch.Tensor) -> None:
        """Copy groups of rows to the table from the ranks that have them; group -1 is none."""
        require_contiguous(rows_Q=rows_Q, groups_Q=groups_Q)
        chunk = self.own.shape[1]
        wanted = (len(rows_Q),)
        picked = self.own.new_empty(len(rows_Q), GROUP)
        _pick_kernel[wanted](
            own_ptr=self.own,
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
