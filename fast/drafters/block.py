"""Drafters that make all drafts of a round in one forward over a block, see the reference."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.block import BlockDrafterConfig
from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement, check_topk
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch, DraftExtendInput, DraftInput, ExplicitCandidates, PrefillInput
from specsim.core.pool import KVPool
from specsim.fast.drafters.block_head import BlockHead
from specsim.fast.drafters.slot_tree import SlotTree
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import CandidateBuffers
from specsim.fast.kv import draft_kv
from specsim.fast.model.metadata import (
    WORD,
    AttentionMetadata,
    equal_rows,
    extend_metadata,
    prefill_metadata,
    slot_of,
    store_own_extras,
    store_rows,
)  # fmt: skip
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel
from specsim.fast.targets.decoder import DecoderTarget


@triton.jit
@no_type_check
def _first_bits(count, word):
    """Set the first `count` bits of a sequence of words, and return one of them."""
    count = tl.minimum(tl.maximum(count - word * WORD, 0), WORD).to(tl.int64)
    return ((tl.full(count.shape, 1, tl.int64) << count) - 1).to(tl.int32)


@kernel
@no_type_check
def _block_kernel(
    metadata_ptrs,
    causal_ptr,
    slots_ptr,
    ids_ptr,
    bonus_tokens_ptr,
    table_ptr,
    rows_ptr,
    lens_ptr,
    num_requests,
    num_rows,
    mask_token,
    max_len,
    columns,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the ids and the metadata of some rows, each request with num_rows of them from column L on."""
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
    mask = offs < num_requests * num_rows
    request = offs // num_rows
    step = offs % num_rows
    row = tl.load(rows_ptr + request, mask=mask, other=-1)
    real = row >= 0
    length = tl.load(lens_ptr + request, mask=mask & real, other=0)
    limit = tl.minimum(max_len, columns)
    live = mask & real & (length + step < limit)
    slot = slot_of(table_ptr, columns, row, length + step, mask=live)
    position = tl.where(live, length + step, 0)
    bonus = tl.load(bonus_tokens_ptr + request, mask=mask, other=0).to(tl.int64)
    tl.store(ids_ptr + offs, tl.where(step == 0, bonus, mask_token), mask=mask)
    tl.store(slots_ptr + offs, slot, mask=mask)
    store_rows(
        metadata_ptrs,
        offs,
        num_rows,
        position=position,
        prefix_len=tl.where(live, length, 0),
        key_len=length,
        num_extras=tl.where(real, num_rows, 0),
        mask=mask,
    )
    store_own_extras(metadata_ptrs, offs, slot, position, mask)
    num_words = (num_rows + WORD - 1) // WORD
    num_live = tl.where(live, tl.minimum(num_rows, limit - length), 0)
    for word in range(num_words):
        address = offs * num_words + word
        tl.store(metadata_ptrs.visible + address, _first_bits(num_live, word), mask=mask)
        tl.store(causal_ptr + address, _first_bits(tl.minimum(num_live, step + 1), word), mask=mask)


def block_input(
    batch: Batch, bonus_tokens: torch.Tensor, num_rows: int, mask_token: int, max_len: int, pools: KVPool
) -> tuple[torch.Tensor, Mapping[bool, AttentionMetadata]]:
    """Make the ids i64 [R] and the metadata of blocks [bonus, mask, mask, ...], whose row j is column L + j.

    The metadata is that of rows which see their whole block (False), or its rows up to their own (True). A row at or
    beyond max_len is dropped, and seen by none.
    """
    total = batch.size * num_rows
    slots = torch.empty(total, dtype=torch.int64, device=batch.seq_lens.device)
    ids_R = torch.empty_like(slots)
    metadata = equal_rows(batch, slots, num_rows, num_rows, pools)
    causal = replace(metadata, visible=torch.empty_like(metadata.visible))
    block = block_of(total, 128)
    _block_kernel[(ceil_div(total, block),)](
        metadata_ptrs=metadata.tensors,
        causal_ptr=causal.visible,
        slots_ptr=slots,
        ids_ptr=ids_R,
        bonus_tokens_ptr=bonus_tokens,
        table_ptr=pools.req_to_token,
        rows_ptr=batch.req_pool_indices,
        lens_ptr=batch.seq_lens,
        num_requests=batch.size,
        num_rows=num_rows,
        mask_token=mask_token,
        max_len=max_len,
        columns=pools.req_to_token.shape[1],
        BLOCK=block,
    )
    return ids_R, {False: metadata, True: causal}


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

    def start(self, batch: Batch, draft_input: DraftInput, buffers: CandidateBuffers, pools: KVPool) -> None:
        """Run the blocks, and leave the candidates in the buffers."""
        block = self._head.block
        bonus = draft_input.bonus_tokens
        ids_R, metadata = block_input(batch, bonus, self.block_rows, block.mask_token, self._config.length_limit, pools)
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
    drafter: DrafterCheckpoint[BlockDrafterConfig], target: DecoderTarget, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make a block drafter of a fast engine."""
    head = BlockHead(drafter.config, drafter.tensors, target, on)
    return BlockDrafter(head, config, target.config.vocab_size)
