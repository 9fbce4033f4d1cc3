"""Losses of a draft against the target's distribution p, by its logits with q = softmax, and weights of depths.

B windows · A rows that draft · V vocabulary of drafts · S depths. Acceptance by rejection sampling has the probability
α = Σ min(p, q) = 1 - TV(p, q). Sources: LK losses (arXiv 2602.23881), D-PACE (arXiv 2605.18810), decay by
depth (arXiv 2503.01840).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from specsim.training.drafter import DrafterModule, Drafts, Roots
    from specsim.training.target import TargetReading

DECAY = 0.9  # of a depth's weight by the one before
SMOOTHING = 0.5  # of D-PACE's confidences
LK_RATE = 3.0  # η: how fast the LK loss turns from KL to TV as acceptance grows
SMALLEST = 1e-6  # acceptance whose logarithm is taken


def cross_entropy(logits_BAV: torch.Tensor, prob_BAV: torch.Tensor) -> torch.Tensor:
    """-Σ p log q, in nats: [B, A]."""
    return logits_BAV.logsumexp(-1) - (prob_BAV * logits_BAV).sum(-1)


def kl(logits_BAV: torch.Tensor, prob_BAV: torch.Tensor) -> torch.Tensor:
    """Σ p log(p / q), which has the gradient of the cross-entropy: [B, A]."""
    return cross_entropy(logits_BAV, prob_BAV) + torch.xlogy(prob_BAV, prob_BAV).sum(-1)


def total_variation(logits_BAV: torch.Tensor, prob_BAV: torch.Tensor) -> torch.Tensor:
    """1 - α: [B, A]."""
    return 1 - torch.minimum(logits_BAV.softmax(-1), prob_BAV).sum(-1)


def log_acceptance(logits_BAV: torch.Tensor, prob_BAV: torch.Tensor) -> torch.Tensor:
    """-log α: [B, A]."""
    return -(1 - total_variation(logits_BAV, prob_BAV)).clamp_min(SMALLEST).log()


def lk(logits_BAV: torch.Tensor, prob_BAV: torch.Tensor) -> torch.Tensor:
    """λ KL + (1 - λ) TV with λ = exp(-η α), through which no gradient flows: [B, A]."""
    variation_BA = total_variation(logits_BAV, prob_BAV)
    share_BA = (-LK_RATE * (1 - variation_BA.detach())).exp()
    return share_BA * kl(logits_BAV, prob_BAV) + (1 - share_BA) * variation_BA


LOSSES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "cross-entropy": cross_entropy,
    "kl": kl,
    "tv": total_variation,
    "log-acceptance": log_acceptance,
    "lk": lk,
}


def decay(drafts: "Sequence[Drafts]", prob_BCV: torch.Tensor) -> list[torch.Tensor]:
    """0.9 to the power of the depth."""
    return [torch.tensor(DECAY**step, device=prob_BCV.device) for step in range(len(drafts))]


def equal(drafts: "Sequence[Drafts]", prob_BCV: torch.Tensor) -> list[torch.Tensor]:
    """1 for every depth."""
    return [torch.ones((), device=prob_BCV.device)] * len(drafts)


@torch.no_grad()
def d_pace(drafts: "Sequence[Drafts]", prob_BCV: torch.Tensor) -> list[torch.Tensor]:
    """Expected number of drafts that a depth lets through, by the drafter's own confidence: [B, A] for each.

    w_j = Σ_{m ≥ j} Π_{i ≤ m} ((1 - s) q_i + s) with the draft's probability q_i of the target's first choice and
    s = 0.5. The rows of all depths have to be alike.
    """
    confidences = []
    for draft in drafts:
        token_BA = draft.at_columns(prob_BCV).argmax(-1)
        prob_BA = draft.logits_BAV.float().softmax(-1).gather(-1, token_BA[..., None])[..., 0]
        confidences.append(((1 - SMOOTHING) * prob_BA + SMOOTHING) * (draft.weights_BA > 0))
    survival_SBA = torch.stack(confidences).cumprod(0)
    return list(survival_SBA.flip(0).cumsum(0).flip(0))


POSITION_WEIGHTS: Mapping[str, Callable[..., list[torch.Tensor]]] = {"decay": decay, "equal": equal, "d-pace": d_pace}


def drafting_loss(
    drafter: "DrafterModule",
    reading: "TargetReading",
    tokens_BC: torch.Tensor,
    roots: "Roots",
    num_drafts: int,
    loss: str,
    position_weights: str,
) -> torch.Tensor:
    """Average a loss over depths, by the depths' weights, and over rows, by the rows' weights."""
    drafts = drafter.drafts(reading, tokens_BC, roots, num_drafts)
    prob_BCV = reading.prob(drafter.vocabulary)
    weights = POSITION_WEIGHTS[position_weights](drafts, prob_BCV)
    total = torch.zeros((), device=tokens_BC.device)
    for draft, weight in zip(drafts, weights, strict=True):
        prob_BAV = draft.at_columns(prob_BCV)
        loss_BA = LOSSES[loss](draft.logits_BAV.float(), prob_BAV)
        total = total + (weight * draft.weights_BA * loss_BA).mean()
        total = total + weight.mean() * drafter.auxiliary_loss(draft, prob_BAV, reading)
    return total / sum(weight.mean() for weight in weights)
