"""Multi-token prediction by S modules (DeepSeek-V3, arXiv 2412.19437), all of which run in draft-extend.

Row p of module k reads token p+1+k and g_k(p), attends to rows 0..p of its own KV, and gives h_k(p). g_0 is the
target's hidden state after its final norm; g_k is h_{k-1}, or g_0 for every k without hidden_chain. With L committed
tokens, row L-1 of module k gives draft d_{k+1}. Rows L-k..L-1 read drafts, as their tokens are not known yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Placement
from specsim.core.mtp import MtpConfig, check_modules
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.core.product import ProductInput
from specsim.core.target import Target
from specsim.reference.attention import AttentionMetadata, causal_metadata
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter, DecoderHead
from specsim.reference.drafters.product import ProductDrafter
from specsim.reference.drafting import Parents, RowDrafts, draft
from specsim.reference.kv import draft_kv
from specsim.reference.targets.decoder import decoder_layer


class MtpModule(DecoderHead):
    """Module k: norm(layer(eh_proj(concat(enorm(embedding), hnorm(hidden))))), read by the target's head.

    Its KV is layer k of the draft buffer. As a head, it is used once in each step, with its own output as hidden state.
    """

    def __init__(
        self,
        config: MtpConfig,
        tensors: Mapping[str, torch.Tensor],
        target: Target,
        dtype: torch.dtype,
        index: int = 0,
    ) -> None:
        super().__init__(config, tensors, target, dtype)
        self._weights = self._weights.under(f"modules.{index}")
        self._index = index

    @property
    def kv_layout(self) -> KVLayout:
        """Shape of the KV of this module alone."""
        return replace(self._model.kv_layout, num_layers=1)

    def forward(
        self, input_ids_R: torch.Tensor, hidden_RH: torch.Tensor, metadata: AttentionMetadata, kv: KVBuffer
    ) -> torch.Tensor:
        """Run rows through the module, and write their KV: hidden after the norm, [R, H]."""
        weights = self._weights
        both = torch.cat([self._norm(self._embedding[input_ids_R], "enorm"), self._norm(hidden_RH, "hnorm")], -1)
        hidden_RH = weights.project(both, "eh_proj")
        hidden_RH, _ = decoder_layer(hidden_RH, weights, self._model, self._inverse_D, self._index, kv, metadata)
        return self._norm(hidden_RH, "norm")


class ModuleRows(NamedTuple):
    """Rows of one call of all modules, request after request."""

    row_starts: torch.Tensor  # i64 [B+1]
    requests: torch.Tensor  # i64 [R]
    columns: torch.Tensor  # i64 [R]
    features: torch.Tensor  # [R, H], target's hidden states
    metadata: AttentionMetadata


class MtpDrafter(ProductDrafter[ProductInput]):
    """The first S modules of a checkpoint as a drafter.

    Rows that read drafts hold wrong tokens once these are refused. The next draft-extend, or the next chunk of a
    prompt, writes them again from the kept target features of S-1 positions (unless boundary is `stale`).

    With K > 1 the tree is a product: all lanes of a depth have the same K children, which module k ranked after the
    best draft of every depth above. So children of other lanes fit their parents less well.
    """

    def __init__(
        self,
        drafter: MtpConfig,
        tensors: Mapping[str, torch.Tensor],
        target: Target,
        dtype: torch.dtype,
        config: SpecConfig,
    ) -> None:
        super().__init__(ProductInput, config)
        self._vocab_size = target.config.vocab_size
        check_modules(drafter, config)
        self._modules = [MtpModule(drafter, tensors, target, dtype, k) for k in range(config.num_steps)]
        self._drafter = drafter
        self._dtype = dtype
        self._hidden_size = drafter.model.hidden_size
        self.kv_layout = replace(drafter.model.kv_layout, num_layers=config.num_steps)
        self.feature_layers = drafter.feature_layers
        self.lookahead = config.num_steps - 1 if drafter.boundary == "rewrite" else 0

    def _draft(
        self, batch: Batch, start_lens: torch.Tensor, features: list[torch.Tensor], bonus: torch.Tensor, pools: KVPool
    ) -> ProductInput:
        """Run all modules over each request's new rows, from start_lens on, and those before them to write again."""
        end_lens = start_lens + torch.tensor(list(map(len, features)), dtype=torch.int64)
        rows = self._rows(batch, start_lens, features, pools)
        last_B = rows.row_starts[1:] - 1
        hidden_RH = rows.features
        drafts: list[RowDrafts] = []
        hidden = []
        for depth, module in enumerate(self._modules):
            ids_R = _next_ids(batch, rows, depth, end_lens, drafts, pools)
            hidden_RH = module.forward(ids_R, hidden_RH, rows.metadata, draft_kv(pools))
            hidden.append(hidden_RH[last_B])
            drafts.append(self._drafts(batch, module.logits(hidden[-1]), end_lens, depth))
            hidden_RH = hidden_RH if self._drafter.hidden_chain else rows.features
        return self._finished(bonus, torch.stack(hidden, 1), drafts)

    def _rows(self, batch: Batch, start_lens: torch.Tensor, features: list[torch.Tensor], pools: KVPool) -> ModuleRows:
        """Put the rows that are written again before each request's new ones, and keep the new ones' features."""
        ring = pools.recent if self.lookahead else None
        joined = []
        for row, start, new in zip(batch.req_pool_indices.tolist(), start_lens.tolist(), features, strict=True):
            joined.append(new if ring is None else torch.cat([ring.before(row, start, self.lookahead), new]))
            if ring is not None:
                ring.write(row, start, new)
        counts = torch.tensor(list(map(len, joined)), dtype=torch.int64)
        first_lens = start_lens + torch.tensor(list(map(len, features)), dtype=torch.int64) - counts
        row_starts = pad(counts.cumsum(0), (1, 0))
        requests = torch.arange(batch.size).repeat_interleave(counts)
        columns = torch.arange(len(requests)) + (first_lens - row_starts[:-1])[requests]
        slots = pools.req_to_token[batch.req_pool_indices[requests], columns]
        slots = torch.where(columns < self._config.length_limit, slots, -1)
        metadata = causal_metadata(batch.req_pool_indices, first_lens, row_starts, slots, pools)
        none = torch.empty(0, self._hidden_size, dtype=self._dtype)
        return ModuleRows(row_starts, requests, columns, torch.cat([none, *joined]), metadata)

    def _drafts(self, batch: Batch, logits_BV: torch.Tensor, root_lens: torch.Tensor, depth: int) -> RowDrafts:
        """Draft K tokens at a depth, the best ones or sampled ones, for rounds whose roots are at root_lens."""
        parents = Parents(logits_BV, root_lens, depth)
        return draft(batch, parents, self._config.topk, self._modules[0].d2t, self._config, self._vocab_size)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._modules[0].logits(hidden_RH)

    def idle(self) -> ProductInput:
        return ProductInput.zeros(0, self._config, self._hidden_size, self._dtype, self._vocab_size)


def _next_ids(
    batch: Batch, rows: ModuleRows, depth: int, end_lens: torch.Tensor, drafts: Sequence[RowDrafts], pools: KVPool
) -> torch.Tensor:
    """Find the ids i64 [R] that a module reads: token p+1+depth, or the first lane's draft of it."""
    tokens_R = rows.columns + 1 + depth
    unknown_R = (tokens_R - end_lens[rows.requests]).clamp(min=0)  # 1 for the first draft
    ids_R = pools.token_ids[batch.req_pool_indices[rows.requests], tokens_R - unknown_R]
    for number, depth_drafts in enumerate(drafts, 1):
        ids_R = torch.where(unknown_R == number, depth_drafts.topk_index[rows.requests, 0], ids_R)
    return ids_R


def make(drafter: DrafterCheckpoint[MtpConfig], target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make MTP modules the drafter of a reference engine: one of them in every step, or several in draft-extend."""
    shape = drafter.config
    if shape.num_modules > 1:
        return MtpDrafter(shape, drafter.tensors, target, on.dtype, config)
    module = MtpModule(shape, drafter.tensors, target, on.dtype)
    return AutoregressiveDrafter(module, config, on.dtype, target.config.vocab_size)
