"""P-EAGLE (arXiv 2602.01469, vllm-project/vllm#32887): an EAGLE-3 head that drafts every depth in one forward.

With L committed tokens, rows 0..L-1 are EAGLE-3's: token p+1 with the target's features of position p. Rows L..L+S-2
read the mask token, and `mask_hidden` in place of features, which fc projects like them. All rows attend causally, so a
mask row sees the context and the mask rows before it. Row L-2+d gives the draft of depth d.
"""

import torch
from torch.nn.functional import pad

from specsim.core.config import SpecConfig
from specsim.core.drafter import Drafter, Head, Placement
from specsim.core.eagle import Mask, PEagleConfig
from specsim.core.pair import DrafterCheckpoint
from specsim.core.phases import Batch
from specsim.core.pool import KVPool
from specsim.core.product import ProductInput
from specsim.core.target import Target
from specsim.reference.attention import causal_metadata
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.drafters.eagle3 import Eagle3Head
from specsim.reference.drafters.product import ProductDrafter
from specsim.reference.kv import draft_kv


class PEagleDrafter(ProductDrafter[ProductInput]):
    """An EAGLE-3 head whose prefill and draft-extend run S-1 mask rows after each request's own rows.

    The KV of mask rows is of no use to the next round, whose rows overwrite it. With K > 1 the tree is a product: all
    lanes of a depth have the same K children.
    """

    def __init__(self, head: Head, config: SpecConfig, mask: Mask, vocab_size: int) -> None:
        super().__init__(ProductInput, config)
        dtype = mask.features.dtype
        self._rows = AutoregressiveDrafter(head, config, dtype, vocab_size)
        self._head = head
        self._mask = mask
        self._idle = ProductInput.zeros(0, config, head.hidden_size, dtype, vocab_size)
        self.kv_layout = head.kv_layout
        self.feature_layers = head.feature_layers
        self.num_mask_rows = config.num_steps - 1

    def _draft(
        self, batch: Batch, start_lens: torch.Tensor, features: list[torch.Tensor], bonus: torch.Tensor, pools: KVPool
    ) -> ProductInput:
        """Run each request's rows from start_lens on, and S-1 mask rows, and draft from the last S of them."""
        num_steps = self._config.num_steps
        masks_MF = self._mask.features.expand(num_steps - 1, -1)
        features_RF = torch.cat([masks_MF[:0], *(part for rows_RF in features for part in (rows_RF, masks_MF))])
        num_rows = torch.tensor(list(map(len, features)), dtype=torch.int64)
        row_starts = pad((num_rows + num_steps - 1).cumsum(0), (1, 0))
        ids = []
        slots = []
        for row, (start, count) in zip(
            batch.req_pool_indices.tolist(), zip(start_lens.tolist(), num_rows.tolist(), strict=True), strict=True
        ):
            columns = torch.arange(start, start + count + num_steps - 1)
            token_ids = pools.token_ids[row, columns[:count] + 1]
            ids += [token_ids, torch.full((num_steps - 1,), self._mask.token_id)]
            slots.append(torch.where(columns < self._config.length_limit, pools.req_to_token[row, columns], -1))
        none = torch.empty(0, dtype=torch.int64)
        slots_R = torch.cat([none, *slots])
        metadata = causal_metadata(batch.req_pool_indices, start_lens, row_starts, slots_R, pools)
        hidden_RH = self._head.forward(torch.cat([none, *ids]), self._head.fuse(features_RF), metadata, draft_kv(pools))
        last_BS = row_starts[1:, None] - num_steps + torch.arange(num_steps)
        return self._drafts_of(batch, hidden_RH[last_BS], slots_R[last_BS], start_lens + num_rows, bonus)

    def _drafts_of(
        self,
        batch: Batch,
        hidden_BSH: torch.Tensor,
        slots_BS: torch.Tensor,
        root_lens: torch.Tensor,
        bonus: torch.Tensor,
    ) -> ProductInput:
        """Draft K tokens of every depth; a row at or beyond max_len has no slot and proposes nothing."""
        drafts = [
            self._rows.drafts(batch, self.logits(hidden_BSH[:, depth]), self._config.topk, root_lens, depth, slots_B)
            for depth, slots_B in enumerate(slots_BS.unbind(1))
        ]
        return self._finished(bonus, hidden_BSH, drafts)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._head.logits(hidden_RH)

    def idle(self) -> ProductInput:
        return self._idle


def make(drafter: DrafterCheckpoint[PEagleConfig], target: Target, config: SpecConfig, on: Placement) -> Drafter:
    """Make a P-EAGLE head as the drafter of a reference engine."""
    head = Eagle3Head(drafter.config, drafter.tensors, target, on.dtype)
    return PEagleDrafter(head, config, Mask.of(drafter.config, drafter.tensors, on), target.config.vocab_size)
