"""Drafters that make all drafts of a round in one forward over a block.

Draft-extend writes the context's KV only, column p from the target's features of p. The draft phase runs rows
[bonus, mask, mask, ...] at columns L, L+1, ... Their KV is dropped: the next context overwrites it.
"""

from typing import Self

import torch

from specsim.core.block import BlockDrafterConfig
from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement, check_topk
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.target import Target
from specsim.reference.attention import AttentionMetadata, Keys, extend_metadata, prefill_metadata
from specsim.reference.drafters.block_head import BlockHead
from specsim.reference.drafters.slot_tree import Slots, best_first, sampled_lanes
from specsim.reference.kv import draft_kv


class BlockDrafter(Drafter):
    """A head as a drafter, for a target of `vocab_size` tokens; between rounds it keeps the root only."""

    def __init__(self, head: BlockHead, config: SpecConfig, vocab_size: int) -> None:
        check_topk(config, head.draft_vocab_size)
        self._head = head
        self._config = config
        self._vocab_size = vocab_size
        self.kv_layout = head.kv_layout
        self.feature_layers = head.feature_layers
        self.block = head.block
        self.block_rows = head.block.rows(config)

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Write the context of a prefill."""
        self._head.write_context(features_RF, prefill_metadata(batch, prefill, pools), draft_kv(pools))
        return DraftInput(next_tokens.int())

    def extend(self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool) -> DraftInput:
        """Write the context of the accepted rows, over the KV of the block."""
        extend = draft_extend_input
        self._head.write_context(extend.hidden, extend_metadata(batch, extend, pools), draft_kv(pools))
        return DraftInput(extend.bonus_tokens)

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> ExplicitCandidates:
        """Run one block for each request, and draft from its slots: a tree, or sampled lanes."""
        head = self._head
        ids_BR = torch.full((batch.size, self.block_rows), head.block.mask_token)
        ids_BR[:, 0] = draft_input.bonus_tokens
        metadata = {
            is_causal: block_metadata(batch, self.block_rows, self._config.length_limit, pools, is_causal)
            for is_causal in (False, True)
        }
        hidden_RH = head.forward(ids_BR.flatten(), metadata, draft_kv(pools))
        hidden_BSH = hidden_RH.unflatten(0, ids_BR.shape)[:, head.block.first_slot :]
        depths_B = (self._config.length_limit - 1 - batch.seq_lens).clamp(min=0)
        slots = Slots(hidden_BSH, draft_input.bonus_tokens.long(), depths_B)
        grow = sampled_lanes if self._config.is_sampled else best_first
        return grow(batch, head, slots, self._config, self._vocab_size)

    def with_config(self, config: SpecConfig) -> Self:
        return type(self)(self._head, config, self._vocab_size)


def block_metadata(
    batch: Batch, num_rows: int, max_len: int, pools: KVPool, is_causal: bool = False
) -> AttentionMetadata:
    """Make the metadata of blocks: rows see columns 0..L-1, and their whole block or its rows up to themselves.

    Row j is column L + j. A row at or beyond max_len is dropped, and seen by none.
    """
    block_RR = torch.ones(num_rows, num_rows, dtype=torch.bool)
    block_RR = block_RR.tril() if is_causal else block_RR
    keys = []
    positions_BR = batch.seq_lens[:, None] + torch.arange(num_rows)
    slots_BR = pools.slots(batch.req_pool_indices[:, None], positions_BR)
    slots_BR = torch.where(positions_BR < max_len, slots_BR, -1)
    for request, (row, length) in enumerate(batch.rows_and_lens):
        prefix = torch.arange(length)
        block_slots = slots_BR[request]
        live = block_slots >= 0
        mask = torch.nn.functional.pad(block_RR & live, (length, 0), value=True) & live[:, None]
        keys.append(
            Keys(torch.cat([pools.slots(row, prefix), block_slots]), torch.cat([prefix, positions_BR[request]]), mask)
        )
    slots_R = slots_BR.flatten()
    return AttentionMetadata(torch.where(slots_R < 0, 0, positions_BR.flatten()), slots_R, tuple(keys))


def make(drafter: DrafterCheckpoint[BlockDrafterConfig], target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make a block drafter of a reference engine."""
    head = BlockHead(drafter.config, drafter.tensors, target, on.dtype)
    return BlockDrafter(head, config, target.config.vocab_size)
