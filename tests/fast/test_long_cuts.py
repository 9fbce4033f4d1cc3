"""Cuts of rows that are read several times, because too many of their tokens count for a list."""

import math

import pytest
import torch

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch
from specsim.fast import sampling as fast
from specsim.fast.vocabulary.distribution import Distributions
from specsim.fast.vocabulary.penalties import Logits
from specsim.fast.vocabulary.summaries import LOWEST_RANK
from specsim.reference.sampling import target_prob

LOG2_E = math.log2(math.e)  # the temperature at which weights of integer logits are powers of two: nothing is rounded
FILTERS = (dict(top_k=700), dict(top_p=0.75), dict(min_p=0.125), dict(top_k=900, top_p=0.5, min_p=0.25), dict(top_k=3))


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("adjusted", [False, True])
def test_marked_rows_are_cut_as_the_references(adjusted, by_row, device, program_order, monkeypatch):
    """The last row is not marked and keeps what it has; by_row: more rows than programs."""
    if by_row:
        monkeypatch.setattr(fast, "block_of", lambda count, on_gpu, others=1: on_gpu)
        monkeypatch.setattr(fast, "PROGRAMS", 2)
    params = [SamplingParams(temperature=LOG2_E, **filters) for filters in FILTERS]
    batch = Batch.of(range(5), range(5), [3] * 5, params, 1000)
    logits_RV = torch.randint(-4, 1, (5, 1000)).float()
    logits_RV[:, 500] = 0.0
    raw_RV, adjusted_RV = logits_RV.bfloat16(), torch.full((5, 1000), torch.nan)
    if adjusted:
        raw_RV, adjusted_RV = torch.full_like(raw_RV, torch.nan), logits_RV
    changed_B = torch.full((5,), int(adjusted), dtype=torch.int32)
    total_R = logits_RV.exp2().sum(-1)
    moments = torch.stack([torch.zeros(5), torch.ones(5), total_R.log2(), total_R], 1)
    lasts = torch.tensor([[LOWEST_RANK.value, -1, int(adjusted)]] * 4 + [[7, 8, int(adjusted)]], dtype=torch.int32)
    logits = Logits(raw_RV.to(device), changed_B.to(device), adjusted_RV.to(device))
    none = torch.empty(5, 0, device=device)
    made = Distributions(logits, none, none, moments.to(device), lasts.to(device))
    fast.cut_long_rows(batch.to(device), made)
    for row in range(4):
        kept_V = target_prob(logits_RV[row].double(), batch.sampling, row) > 0
        last_token = int(made.lasts[row, 1])
        last = logits_RV[row][kept_V].min()
        assert (
            kept_V[min(last_token, 999) + 1 :].logical_and(logits_RV[row, min(last_token, 999) + 1 :] == last).sum()
            == 0
        )
        assert made.moments[row, 3].item() == logits_RV[row][kept_V].exp2().sum().item()
    assert made.lasts[4].tolist() == [7, 8, int(adjusted)]
    assert torch.equal(made.moments[4].cpu(), moments[4])
