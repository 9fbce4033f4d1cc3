"""Drafters that make all drafts of a round in one forward over a block (DFlash, DSpark), see the reference."""

from dataclasses import replace
from typing import Self

import torch

from specsim.core.block import BlockDrafterConfig
from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement, check_topk
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVPool
from specsim.core.target import Target
from specsim.fast.drafters.block_head import BlockHead
from specsim.fast.drafters.slot_tree import SlotTree
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers
from specsim.fast.kv import draft_kv
from specsim.fast.model.block_metadata import block_metadata
from specsim.fast.model.metadata import extend_metadata, prefill_metadata


class BlockDrafter(StepDrafter):
    """A head as a step drafter, which does all its work in `start`; between rounds it keeps the root only."""

    def __init__(self, head: BlockHead, config: SpecConfig, vocab_size: int) -> None:
        check_topk(config, head.draft_vocab_size)
        self._head = head
        self._device = head.device
        self._config = config
        self._vocab_size = vocab_size
        self._tree = SlotTree(head, config, vocab_size)
        self.kv_layout = head.kv_layout
        self.feature_layers = head.feature_layers
        self.block = head.block
        self.block_rows = head.block.rows(config)

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Write the context of a prefill."""
        self._head.write_context(features_RF.contiguous(), prefill_metadata(batch, prefill, pools), draft_kv(pools))
        return DraftInput(next_tokens.int())

    def buffers(self, size: int) -> CandidateBuffers:
        """Make the candidates of `size` padded requests, on the host."""
        config = self._config
        has_confidence = self._head.block.confidence != "none"
        return CandidateBuffers(
            replace(
                ExplicitCandidates.empty(size, sum(config.level_sizes)),
                confidence=torch.zeros(size, config.num_steps) if has_confidence else None,
                draft_prob=torch.zeros(size, config.num_parents, self._vocab_size) if config.has_draft_prob else None,
            )
        )

    def propose(self, batch: Batch, draft_input: DraftInput, pools: KVPool) -> ExplicitCandidates:
        """Run one block for each request, and draft from its slots: a tree, or sampled lanes."""
        buffers = self.buffers(batch.size).to(self._device)
        self.start(batch, draft_input, buffers, pools)
        return buffers.explicit

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        """Run the blocks, and leave the candidates in the buffers."""
        block = self._head.block
        bonus = draft_input.bonus_tokens
        ids_R, metadata = block_metadata(
            batch, bonus, self.block_rows, block.mask_token, self._config.length_limit, pools
        )
        hidden_RH = self._head.forward(ids_R, metadata, draft_kv(pools))
        hidden_BSH = hidden_RH.view(batch.size, self.block_rows, -1)[:, block.first_slot :]
        self._tree.grow(batch, hidden_BSH.transpose(0, 1).contiguous(), bonus, buffers.explicit)

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: DraftInput | None = None
    ) -> DraftInput:
        """Write the context of the accepted rows, over the KV of the block."""
        extend = draft_extend_input
        self._head.write_context(extend.hidden, extend_metadata(batch, extend, pools), draft_kv(pools))
        return super().extend(batch, extend, pools, out=out)

    def with_config(self, config: SpecConfig) -> Self:
        return type(self)(self._head, config, self._vocab_size)


def make(
    drafter: DrafterCheckpoint[BlockDrafterConfig], target: Target, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make a block drafter of a fast engine."""
    head = BlockHead(drafter.config, drafter.tensors, target, on.dtype, on.device, on.batch_invariant)
    return BlockDrafter(head, config, target.config.vocab_size)
