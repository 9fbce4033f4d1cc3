"""Slices of ranks joined to rows."""

from functools import partial

import pytest
import torch

from specsim.fast.runtime.peer_memory import join_slices, without_padding


def _joined(logits_RV, ranks):
    size = logits_RV.shape[1]
    tokens = ranks.part.tokens(size)
    padding = ranks.part.chunk(size) - len(tokens)
    own = torch.nn.functional.pad(logits_RV[:, tokens.start : tokens.stop], (0, padding))
    joined = join_slices(ranks, own, size)
    return joined, without_padding(ranks, own, size)[:, len(tokens) :]


@pytest.mark.parametrize("vocab_size", [1, 7, 48, 600])
def test_joined_slices_are_the_row(in_two_ranks, vocab_size):
    logits = torch.randn(3, vocab_size)
    for joined, padding in in_two_ranks(partial(_joined, logits)):
        assert torch.equal(joined, logits)
        assert (padding == float("-inf")).all()
