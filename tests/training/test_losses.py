"""Losses have the values that definitions give, are least for the target's distribution, and weigh depths."""

import math

import pytest
import torch

from specsim.training import LOSSES, POSITION_WEIGHTS, Drafts
from specsim.training.losses import DECAY, LK_RATE

PROB = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
DRAFT = torch.tensor([0.25, 0.5, 0.125, 0.125], dtype=torch.float64)  # α = 0.75
KL = 0.5 * math.log(2) - 0.25 * math.log(2)
ENTROPY = 0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(8)
SHARE = math.exp(-LK_RATE * 0.75)
EXPECTED = {
    "cross-entropy": KL + ENTROPY,
    "kl": KL,
    "tv": 0.25,
    "log-acceptance": -math.log(0.75),
    "lk": SHARE * KL + (1 - SHARE) * 0.25,
}


def value_of(name: str, draft: torch.Tensor, prob: torch.Tensor = PROB) -> float:
    return float(LOSSES[name](draft.log()[None, None], prob[None, None]))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_has_the_value_of_its_definition(name):
    assert value_of(name, DRAFT) == pytest.approx(EXPECTED[name], rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_least_for_the_targets_distribution(name):
    least = value_of(name, PROB)
    assert least == pytest.approx(ENTROPY if name == "cross-entropy" else 0.0, abs=1e-12)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        other = torch.rand(4, generator=generator, dtype=torch.float64) + 0.01
        assert value_of(name, other / other.sum()) > least


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_are_finite_without_overlap(name):
    logits = torch.tensor([[[100.0, 0.0, 0.0, 0.0]]], requires_grad=True)
    loss = LOSSES[name](logits, torch.tensor([[[0.0, 1.0, 0.0, 0.0]]]))
    loss.sum().backward()
    assert loss.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def drafts_of(prob_SV: torch.Tensor, exists: list[float]) -> list[Drafts]:
    column = torch.zeros(1, 1, dtype=torch.long)
    return [
        Drafts(prob_V.log()[None, None], column + depth, torch.tensor([[weight]]))
        for depth, (prob_V, weight) in enumerate(zip(prob_SV, exists, strict=True))
    ]


def test_fixed_weights_are_those_of_the_depth():
    drafts = drafts_of(torch.full((3, 2), 0.5), [1.0, 1.0, 1.0])
    prob_BCV = torch.full((1, 3, 2), 0.5)
    assert [float(weight) for weight in POSITION_WEIGHTS["decay"](drafts, prob_BCV)] == pytest.approx(
        [1, DECAY, DECAY**2]
    )
    assert [float(weight) for weight in POSITION_WEIGHTS["equal"](drafts, prob_BCV)] == [1, 1, 1]


def test_d_pace_weighs_a_depth_by_drafts_it_lets_through():
    """Confidences 0.6, 0.2 and 1 are smoothed to 0.8, 0.6 and 1; a depth without a draft lets nothing through."""
    prob_BCV = torch.tensor([[[1.0, 0.0]] * 3])
    prob_SV = torch.tensor([[0.6, 0.4], [0.2, 0.8], [1.0, 0.0]])
    weights = POSITION_WEIGHTS["d-pace"](drafts_of(prob_SV, [1.0, 1.0, 1.0]), prob_BCV)
    assert [float(weight) for weight in weights] == pytest.approx([0.8 + 0.48 + 0.48, 0.96, 0.48])
    weights = POSITION_WEIGHTS["d-pace"](drafts_of(prob_SV, [1.0, 1.0, 0.0]), prob_BCV)
    assert [float(weight) for weight in weights] == pytest.approx([1.28, 0.48, 0.0])
