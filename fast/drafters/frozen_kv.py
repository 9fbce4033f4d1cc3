"""Multi-token prediction on frozen KV (Gemma 4's assistants): layers with queries only, over the target's keys."""

from collections.abc import Mapping
from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.drafter import Placement
from specsim.core.frozen_kv import FrozenKVConfig, source_layers
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import AutoregressiveInput, Batch, DraftExtendInput, PrefillInput
from specsim.core.pool import KVBuffer, KVPool
from specsim.fast.drafters.autoregressive import AutoregressiveDrafter, DecoderHead, Last, take_last
from specsim.fast.drafters.steps import StepDrafter
from specsim.fast.drafting import Lanes
from specsim.fast.layers import gated_mlp_residual, query_attention_residual
from specsim.fast.model.metadata import AttentionMetadata, equal_rows, store_rows
from specsim.fast.model.rows import HiddenRows, Norm
from specsim.fast.runtime.launch import await_input, block_of, ceil_div, kernel
from specsim.fast.targets.decoder import DecoderTarget
from specsim.fast.vocabulary.draft_distribution import Root


class FrozenKVHead(DecoderHead):
    """A decoder of queries only, with embedding and hidden state in one buffer for the first projection."""

    def __init__(
        self, config: FrozenKVConfig, tensors: Mapping[str, torch.Tensor], target: DecoderTarget, on: Placement
    ) -> None:
        super().__init__(config, tensors, target, on)
        self._embedding = target.embedding
        self._sources = source_layers(config, target.config)
        self.position = config.position

    @property
    def kv_layout(self) -> None:
        """Shape of its KV: none, as it reads the target's."""
        return None

    def hand_on(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Make the hidden states that the next rows read, of the target's width."""
        return self._weights.project(HiddenRows(hidden_RH), "post_projection")

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows over the target's KV: what the head reads, [R, H]."""
        forward = self._forward(metadata, kv, hidden_RH.dtype)
        joined = self._joined(input_ids_R, self._embedding, hidden_RH)
        hidden = HiddenRows(self._weights.project(joined, "pre_projection"), self._input_norm(0))
        for layer, source in enumerate(self._sources):
            weights = self._weights.under(f"layers.{layer}")
            hidden = query_attention_residual(
                hidden.values,
                hidden,
                weights.under("self_attn"),
                self._model,
                layer,
                source,
                forward,
                self._norm(f"layers.{layer}.post_attention_layernorm"),
            )
            hidden = gated_mlp_residual(hidden, weights.under("mlp"), self._input_norm(layer + 1))
        return hidden.normed()

    def _input_norm(self, layer: int) -> Norm:
        """Return the first norm of a layer, or the final norm after the last layer."""
        return self._norm(f"layers.{layer}.input_layernorm" if layer < self._num_layers else "norm")


@kernel
@no_type_check
def _prefix_kernel(
    metadata_ptrs,
    slots_ptr,
    rows_ptr,
    root,
    num_requests,
    num_rows,
    IS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the metadata of some rows, each request with num_rows of them at one position."""
    await_input(PDL)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)  # [BLOCK]
    mask = offs < num_requests * num_rows
    request = offs // num_rows
    real = tl.load(rows_ptr + request, mask=mask, other=-1) >= 0
    length = tl.load(root.lens_ptr + request, mask=mask, other=0)
    if root.counts_ptr is not None:
        length += tl.load(root.counts_ptr + request, mask=mask, other=0)
    length = tl.where(real, length, 0)
    position = tl.maximum(length - 1, 0) if IS_LAST else length
    tl.store(slots_ptr + offs, tl.full([BLOCK], -1, tl.int64), mask=mask)
    store_rows(
        metadata_ptrs,
        offs,
        num_rows,
        position=position,
        prefix_len=length,
        key_len=length,
        num_extras=tl.zeros([BLOCK], tl.int32),
        mask=mask,
    )


def root_metadata(batch: Batch, root: Root, num_rows: int, position: str, pools: KVPool) -> AttentionMetadata:
    """Make the metadata of `num_rows` rows a request that see columns 0..L-1 of their round.

    position: of all these rows, `last` (L - 1) or `next` (L).
    """
    total = batch.size * num_rows
    slots = torch.empty(total, dtype=torch.int64, device=batch.seq_lens.device)
    metadata = equal_rows(batch, slots, num_rows, 0, pools)
    block = block_of(total, 128)
    _prefix_kernel[(ceil_div(total, block),)](
        metadata_ptrs=metadata.tensors,
        slots_ptr=slots,
        rows_ptr=batch.req_pool_indices,
        root=root,
        num_requests=batch.size,
        num_rows=num_rows,
        IS_LAST=position == "last",
        BLOCK=block,
    )
    return metadata


class FrozenKVDrafter(AutoregressiveDrafter):
    """Lanes of a head that keeps no KV, whose first drafts need one row a request."""

    _head: FrozenKVHead

    def seed(
        self, batch: Batch, prefill: PrefillInput, next_tokens: torch.Tensor, features_RF: torch.Tensor, pools: KVPool
    ) -> AutoregressiveInput:
        """Draft the first round's root children from the target's last hidden state."""
        last = Last(prefill.row_starts, prefill.row_starts.diff(), next_tokens)
        return self._first(batch, features_RF, last, Root(batch.seq_lens), self._empty(batch.size), pools)

    def extend(
        self,
        batch: Batch,
        draft_extend_input: DraftExtendInput,
        pools: KVPool,
        *,
        out: AutoregressiveInput | None = None,
    ) -> AutoregressiveInput:
        """Draft the next round's root children from the hidden state of the last accepted node."""
        out = self._empty(batch.size) if out is None else out
        extend = draft_extend_input
        last = Last(extend.row_starts, extend.num_accepted_tokens, extend.bonus_tokens)
        return self._first(batch, extend.hidden, last, Root(extend.seq_lens, extend.num_accepted_tokens), out, pools)

    def _first(
        self,
        batch: Batch,
        features_RF: torch.Tensor,
        last: Last,
        root: Root,
        out: AutoregressiveInput,
        pools: KVPool,
    ) -> AutoregressiveInput:
        features_BF = features_RF.new_empty(batch.size, features_RF.shape[1])
        take_last(features_RF, last, features_BF, out.bonus_tokens)
        metadata = root_metadata(batch, root, 1, self._head.position, pools)
        ids_B = out.bonus_tokens.long()
        out.hidden.copy_(self._head.forward(ids_B, self._head.fuse(features_BF), metadata, pools.target))
        return self._draft_first(batch, root, out)

    def _copy_tails(self, batch: Batch, pools: KVPool) -> None:
        """Copy nothing, as lanes keep no KV."""

    def _run(self, batch: Batch, lanes: Lanes, pools: KVPool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the lanes' tokens, none of which is dropped, as they stand at the root."""
        metadata = root_metadata(batch, Root(batch.seq_lens), self._config.topk, self._head.position, pools)
        handed_RH = self._head.hand_on(lanes.hidden.flatten(0, 1))
        return self._head.forward(lanes.tokens.view(-1), handed_RH, metadata, pools.target), None


def make(
    drafter: DrafterCheckpoint[FrozenKVConfig], target: DecoderTarget, config: SpecConfig, on: Placement
) -> StepDrafter:
    """Make queries over frozen KV as the drafter of a fast engine."""
    head = FrozenKVHead(drafter.config, drafter.tensors, target, on)
    return FrozenKVDrafter(head, config, on.dtype, on.device, target.config.vocab_size)
