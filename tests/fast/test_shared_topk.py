"""The k best tokens of rows that ranks share: the same bits as of whole rows."""

from functools import partial

import pytest
import torch

from specsim.fast.runtime.peer_memory import without_padding
from specsim.fast.vocabulary.shared_topk import can_share, shared_topk
from specsim.fast.vocabulary.topk import draft_topk


def _cut(ranks, logits_RV: torch.Tensor) -> torch.Tensor:
    """Cut out this rank's slice, with zeros as padding, which the head's padding gives."""
    size = logits_RV.shape[1]
    tokens = ranks.part.tokens(size)
    own = logits_RV[:, tokens.start : tokens.stop]
    return torch.nn.functional.pad(own, (0, ranks.part.chunk(size) - len(tokens)))


def _both(logits_RV, k, score, ranks):
    size = logits_RV.shape[1]
    slots = torch.arange(len(logits_RV)) - (torch.arange(len(logits_RV)) == 1).long() * 9
    d2t = torch.arange(size) % 3
    assert can_share(ranks, size, k)
    own = without_padding(ranks, _cut(ranks, logits_RV), size)
    return shared_topk(ranks, own, size, k, d2t, slots, score), draft_topk(logits_RV, k, d2t, slots, score)


@pytest.mark.parametrize("vocab_size", [33, 48, 600, 1800])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_shared_rows_have_the_best_of_whole_rows(in_ranks, vocab_size, k, score):
    """Tokens, their order and their scores are the same, with ties over the border of slices and a dropped row."""
    logits = torch.randn(5, vocab_size).round(decimals=1).bfloat16()
    logits[0] = 0.5
    logits[2, torch.randperm(vocab_size)[: k + 3]] = 7.0
    logits[3] = -7.0  # below the padding
    for (scores, index), (whole_scores, whole_index) in in_ranks(partial(_both, logits, k, score)):
        assert torch.equal(index, whole_index)
        assert torch.equal(scores, whole_scores)
