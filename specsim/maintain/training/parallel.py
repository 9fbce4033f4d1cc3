"""Drafters that make all drafts after a root token in one forward, in training: P-EAGLE, DFlash and DSpark.

B windows · C columns (tokens) of a window · A roots of a window · V vocabulary · F target features.
The draft of depth d ≥ 1 after a root in column a is token a + d, whose distribution the target gives in column
a + d - 1. Every root has a random number of drafts, so that a drafter learns blocks of any size, and early drafts most.
"""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from specsim.maintain.training.minimise import Budget, minimise
from specsim.maintain.training.recipe import Recipe
from specsim.maintain.training.student import Learner
from specsim.training.heads import Features
from specsim.training.unroll import read_features

PEAK_RATE = 4e-3
GREEDY_SHARE = 0.75  # of rollouts
CONTINUED_SHARE = 0.75  # of roots, in the part of a rollout that the target wrote
CONFIDENCE_WEIGHT = 0.1


class Roots(NamedTuple):
    """Tokens of windows after which drafts are made."""

    columns_BA: torch.Tensor  # i64, at least 1
    num_drafts_BA: torch.Tensor  # i64


class Slot(NamedTuple):
    """Drafts of one depth, after true tokens."""

    logits_BAV: torch.Tensor
    columns_BA: torch.Tensor  # of the target's distributions that they learn
    counts_BA: torch.Tensor  # whether the draft exists
    confidence_BA: torch.Tensor | None = None  # logit of the draft's acceptance


class ParallelLearner(Learner):
    """A drafter in training that drafts every depth at once."""

    @property
    @abstractmethod
    def feature_layers(self) -> list[int]:
        """Target layers whose entering hidden states it reads."""

    @abstractmethod
    def slots(self, features: Features, tokens_BC: torch.Tensor, roots: Roots, depth: int) -> list[Slot]:
        """Draft after each root, for depths 1 to `depth`."""


def draw_rollouts(rollouts: torch.Tensor, count: int, batch: int) -> torch.Tensor:
    """Draw windows [B, C]; `rollouts` has greedy batches and sampled ones in turn."""
    device = rollouts.device
    index = torch.randint(len(rollouts) // 2, (count,), device=device)
    is_sampled = torch.rand(count, device=device) >= GREEDY_SHARE
    return rollouts[2 * batch * (index // batch) + index % batch + batch * is_sampled].long()


def draw_roots(windows_BC: torch.Tensor, prompt_len: int, count: int, depth: int) -> Roots:
    """Draw roots, most of them in the part that continues the prompt."""
    num_windows, num_columns = windows_BC.shape
    continued = round(count * CONTINUED_SHARE)
    parts = ((1, prompt_len, count - continued), (prompt_len, num_columns - depth + 1, continued))
    columns = [torch.randint(low, high, (num_windows, some), device=windows_BC.device) for low, high, some in parts]
    num_drafts_BA = torch.randint(1, depth + 1, (num_windows, count), device=windows_BC.device)
    return Roots(torch.cat(columns, 1), num_drafts_BA)


def parallel_loss(
    learner: ParallelLearner, features: Features, windows_BC: torch.Tensor, roots: Roots, depth: int
) -> torch.Tensor:
    """Cross-entropy against the target's distribution, summed over depths, a mean over the roots of each.

    Confidence learns whether the draft is the target's first choice, which is acceptance at temperature 0.
    """
    loss = torch.zeros((), device=windows_BC.device)
    with torch.autocast(windows_BC.device.type, torch.bfloat16, enabled=windows_BC.is_cuda):
        target_prob_BCV = features.logits_BCV.softmax(-1, dtype=torch.float32)
        window_B1 = torch.arange(len(windows_BC), device=windows_BC.device)[:, None]
        for slot in learner.slots(features, windows_BC, roots, depth):
            logits_BAV = slot.logits_BAV.float()
            prob_BAV = target_prob_BCV[window_B1, slot.columns_BA]
            each_BA = logits_BAV.logsumexp(-1) - (prob_BAV * logits_BAV).sum(-1)
            if slot.confidence_BA is not None:
                is_accepted_BA = (logits_BAV.argmax(-1) == prob_BAV.argmax(-1)).float()
                confidence_BA = slot.confidence_BA.float()
                missed_BA = F.binary_cross_entropy_with_logits(confidence_BA, is_accepted_BA, reduction="none")
                each_BA = each_BA + CONFIDENCE_WEIGHT * missed_BA
            loss = loss + (each_BA * slot.counts_BA).mean()
    return loss


def train_parallel(
    name: str,
    build: Callable[[LlamaForCausalLM, Recipe], ParallelLearner],
    target: LlamaForCausalLM,
    rollouts: torch.Tensor,
    recipe: Recipe,
    budget: Budget,
    folder: Path,
) -> tuple[ParallelLearner, dict[str, Any]]:
    """Train a drafter and write it to `folder`; the one returned holds the written bfloat16 values."""
    torch.manual_seed(2)
    learner = build(target, recipe).to(rollouts.device)
    depth = recipe.parallel_drafts
    loss = torch.compile(parallel_loss, dynamic=False) if rollouts.is_cuda else parallel_loss

    def loss_of_a_batch() -> torch.Tensor:
        windows_BC = draw_rollouts(rollouts, recipe.parallel_batch, recipe.rollouts_a_batch)
        windows_BC = windows_BC[:, : recipe.rollout_rows + 1]
        roots = draw_roots(windows_BC, recipe.rollout_prompt, recipe.parallel_roots, depth)
        with torch.autocast(rollouts.device.type, torch.bfloat16, enabled=rollouts.is_cuda):
            features = read_features(target, windows_BC, learner.feature_layers)
        return loss(learner, features, windows_BC, roots, depth)

    spent = minimise(loss_of_a_batch, learner, PEAK_RATE, budget, name)
    learner.write(folder)
    return learner, {"parameters": learner.num_parameters, **spent._asdict()}


@torch.no_grad()
def parallel_drafts(
    learner: ParallelLearner, target: LlamaForCausalLM, num_drafts: int, tokens_C: torch.Tensor
) -> torch.Tensor:
    """Draft after each token but the first and the last ones: ids [R, num_drafts]."""
    columns_BA = torch.arange(1, len(tokens_C) - num_drafts + 1, device=tokens_C.device)[None]
    roots = Roots(columns_BA, torch.full_like(columns_BA, num_drafts))
    features = read_features(target, tokens_C[None], learner.feature_layers)
    slots = learner.slots(features, tokens_C[None], roots, num_drafts)
    rows = columns_BA.shape[1]
    return torch.stack([slot.logits_BAV[0].argmax(-1)[:rows] for slot in slots], 1)
