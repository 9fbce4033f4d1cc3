"""Train an EAGLE head of the pair within its time, on corpus text that the target continues itself."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from specsim.maintain.training.minimise import Budget, minimise
from specsim.maintain.training.recipe import Recipe
from specsim.training.building import build_head, write_head
from specsim.training.heads import UnrolledHead
from specsim.training.unroll import read_features, unrolled_loss

PEAK_RATE = 4e-3
REGRESSION = {"eagle": 0.2, "eagle3": 0.0}


def train_head(
    name: str,
    target: LlamaForCausalLM,
    tokens: torch.Tensor,
    rollouts: torch.Tensor,
    recipe: Recipe,
    budget: Budget,
    folder: Path,
) -> tuple[UnrolledHead, dict[str, Any]]:
    """Train head `name` and write it to `folder` in bfloat16; the head returned holds the written values."""
    torch.manual_seed(2)
    head = build_head(name, target, tokens, recipe.head)

    def loss_of_a_batch() -> torch.Tensor:
        windows_BC = rollouts[torch.randint(len(rollouts), (recipe.head_batch,), device=rollouts.device)].long()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            features = read_features(target, windows_BC, recipe.feature_layers)
            return unrolled_loss(head, features, windows_BC, recipe.num_unrolled, REGRESSION[name])

    spent = minimise(loss_of_a_batch, head, PEAK_RATE, budget, name)
    write_head(head, folder)
    coverage = torch.isin(tokens, head.vocabulary).float().mean().item()
    parameters = sum(parameter.numel() for parameter in head.parameters())
    return head, {"parameters": parameters, **spent._asdict(), "coverage": coverage}
