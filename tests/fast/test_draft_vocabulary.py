"""Draft ids of target ids, and distributions of draft logits by target id."""

import math

import pytest
import torch

from specsim.fast.vocabulary.draft_distribution import Vocabulary, inverse_of, write_draft_prob

D2T = torch.tensor([1, 1, 3, 3])  # target ids 1, 2, 5, 6


def test_the_inverse_leads_back_to_draft_ids():
    assert inverse_of(D2T, 8).tolist() == [-1, 0, 1, -1, -1, 2, 3, -1]


@pytest.mark.parametrize("step", [None, 0, 1])
def test_a_distribution_is_written_by_target_id(step, device, program_order):
    """The second request draws nothing; the last of two steps has no further parents."""
    weights_RV = torch.tensor([[8.0, 4, 2, 2], [1, 1, 1, 1]])
    moments = torch.tensor([[3.0, 1.0, 2.0], [0.0, 1.0, 0.0]], device=device)
    expected_RV = torch.zeros(2, 8)
    expected_RV[0, [1, 2, 5, 6]] = weights_RV[0] / 16
    vocabulary = Vocabulary(D2T.to(device), inverse_of(D2T, 8).to(device))
    draft_prob = torch.full((2, 8) if step is None else (2, 2, 8), math.pi, device=device)
    at = None if step is None else torch.tensor(step, dtype=torch.int32, device=device)
    write_draft_prob(weights_RV.log2().to(device), moments, vocabulary, draft_prob, 1, at, 2)
    if step is None:
        assert torch.equal(draft_prob.cpu(), expected_RV)
    else:
        assert (draft_prob[:, 0] == draft_prob.new_tensor(math.pi)).all()
        written = torch.full((2, 8), math.pi) if step else expected_RV
        assert torch.equal(draft_prob[:, 1].cpu(), written)
