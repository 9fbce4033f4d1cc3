from types import ModuleType

import pytest
import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, DraftInput
from specsim.fast.drafting import lanes as fast
from specsim.reference import drafting as reference

both = pytest.mark.parametrize("implementation", [reference, fast], ids=["reference", "fast"])


def draft_input(hidden: torch.Tensor | None, draft_prob: torch.Tensor | None = None) -> DraftInput:
    scores = torch.tensor([[0.5, 0.25], [1.0, 0.0]])
    ids = torch.tensor([[7, 3], [2, 9]])
    return AutoregressiveInput(torch.zeros(2, dtype=torch.int32), scores, ids, hidden, draft_prob)


@both
@pytest.mark.parametrize(("num_steps", "parents"), [(1, [-1]), (3, [-1, 0, 1])])
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_lanes_begin_with_the_roots_children(implementation: ModuleType, num_steps, parents, score, device):
    config = SpecConfig(2, num_steps, 3, score=score)
    hidden = torch.randn(2, 5)
    given = draft_input(hidden).to("cpu" if implementation is reference else device)
    lanes = implementation.start_lanes(given, config)
    assert lanes.tokens.tolist() == [[7, 3], [2, 9]]
    assert lanes.path[..., 0].tolist() == [[0, 1], [0, 1]]
    assert torch.equal(lanes.hidden.cpu(), torch.stack([hidden, hidden], dim=1))
    assert lanes.candidates.tokens[:, :2].tolist() == [[7, 3], [2, 9]]
    assert lanes.candidates.parent_list[:, : len(parents)].tolist() == [parents] * 2
    assert torch.equal(lanes.candidates.scores[:, :2], given.topk_scores)


def test_fast_lanes_keep_the_distribution_of_the_roots_children(device):
    config = SpecConfig(2, 3, 7, verifier="multi_round")
    draft_prob = torch.rand(2, 11)
    lanes = fast.start_lanes(draft_input(torch.randn(2, 5), draft_prob).to(device), config)
    assert lanes.candidates.draft_prob.shape == (2, config.num_parents, 11)
    assert torch.equal(lanes.candidates.draft_prob[:, 0].cpu(), draft_prob)


def test_lanes_of_sampled_drafts_need_their_distribution():
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        fast.start_lanes(draft_input(torch.randn(2, 5)), SpecConfig(2, 3, 7, verifier="multi_round"))
