"""The best drafts of rows, from all logits or from those of every rank's slice."""

from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.rank_group import RankGroup
from specsim.fast.vocabulary.shared_topk import can_share, shared_topk
from specsim.fast.vocabulary.topk import draft_topk


def best_drafts(
    head: Any,
    hidden_RH: torch.Tensor,
    config: SpecConfig,
    count: int,
    slots_R: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Select the `count` best drafts of rows by a head: (logits, (scores, ids)).

    head: a Head; with `vocabulary_ranks` it has `rank_logits` too. Where ranks share the vocabulary, the logits are
    those of this rank's slice, unless drafts are drawn from all.
    """
    ranks: RankGroup | None = getattr(head, "vocabulary_ranks", None)
    size = head.draft_vocab_size
    if ranks is None or config.is_sampled or not can_share(ranks, size, count):
        logits_RV = head.logits(hidden_RH)
        return logits_RV, draft_topk(logits_RV, count, head.d2t, slots_R, config.score, out)
    logits_RC = head.rank_logits(hidden_RH)
    return logits_RC, shared_topk(ranks, logits_RC, size, count, head.d2t, slots_R, config.score, out)
