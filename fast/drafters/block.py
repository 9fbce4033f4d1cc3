"""Drafters that make all drafts of a round in one forward over a block (DFlash, DSpark), see the reference."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specsim.core.block import BlockDrafterConfig
from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.errors import require
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVLayout, KVPool
from specsim.core.target import Target
from specsim.fast.drafters.block_head import BlockHead
from specsim.fast.drafters.slot_tree import SlotTree
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers
from specsim.fast.kv import draft_kv
from specsim.fast.model.block_metadata import block_metadata
from specsim.fast.model.metadata import extend_metadata, prefill_metadata


class BlockDrafter:
    """A head as a step drafter, which does all its work in `start`; between rounds it keeps the root only."""

    def __init__(self, head: BlockHead, config: SpecConfig, vocab_size: int) -> None:
        allowed = f"at most the draft vocabulary, {head.draft_vocab_size}"
        require(config.topk <= head.draft_vocab_size, "topk", config.topk, allowed)
        self._head = head
        self._config = config
        self._vocab_size = vocab_size
        self._tree = SlotTree(head, config, vocab_size)
        self.kv_layout: KVLayout | None = head.kv_layout
        self.feature_layers = head.feature_layers
        self.lead = 0
        self.lookahead = 0
        self.block = head.block
        self.num_mask_rows = 0
        self.block_rows = head.block.rows(config)
        self.runs_on_host = False

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> DraftInput:
        """Write the context of a prefill."""
        self._head.write_context(features_RF.contiguous(), prefill_metadata(batch, prefill, pools), draft_kv(pools))
        return DraftInput(next_tokens.int())

    def zeros(self, size: int) -> DraftInput:
        """Make the draft input of `size` padded requests, on the host."""
        return DraftInput(torch.zeros(size, dtype=torch.int32))

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
        made = self.buffers(batch.size).to(self._head.device)
        self.start(batch, draft_input, made, pools)
        return made.explicit

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

    def step(self, batch: Batch, buffers: CandidateBuffers, pools: KVPool) -> None:
        """Do nothing, as all depths are drafted at the start."""

    def extend(
        self, batch: Batch, draft_extend_input: DraftExtendInput, pools: KVPool, *, out: DraftInput | None = None
    ) -> DraftInput:
        """Write the context of the accepted rows, over the KV of the block."""
        extend = draft_extend_input
        self._head.write_context(extend.hidden, extend_metadata(batch, extend, pools), draft_kv(pools))
        if out is None:
            return DraftInput(extend.bonus_tokens)
        out.bonus_tokens.copy_(extend.bonus_tokens)
        return out

    def finish(self, request_id: int, tokens: Sequence[int], prompt_len: int) -> None:
        """Keep nothing of an ended request, as the pool holds all there is."""

    def idle(self) -> DraftInput:
        return self.zeros(0).to(self._head.device)

    def proposer(self, config: SpecConfig) -> StepDrafter:
        return BlockDrafter(self._head, config, self._vocab_size)


def make(
    drafter: DrafterCheckpoint[BlockDrafterConfig], target: Target, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make a block drafter of a fast engine."""
    head = BlockHead(drafter.config, drafter.tensors, target, on.dtype, on.device, on.batch_invariant)
    return BlockDrafter(head, config, target.config.vocab_size)
