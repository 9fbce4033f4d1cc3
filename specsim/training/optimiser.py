"""Optimiser of a small model: Muon and AdamW, one step at a time, and its learning rate."""

from collections.abc import Callable

import torch
from torch import nn

WARM_UP_STEPS = 100
_TABLES = (
    "embed_tokens.weight",
    "lm_head.weight",
    "markov_w1.weight",
    "markov_w2.weight",
    "confidence_head.proj.weight",
)


def make_optimizers(module: nn.Module, peak: float) -> list[torch.optim.Optimizer]:
    """Choose Muon for the matrices in layers, AdamW for the rest: tables by token, heads and vectors."""
    inside = []
    rest = []
    for name, parameter in module.named_parameters():
        is_inside = parameter.ndim == 2 and not name.endswith(_TABLES)
        (inside if is_inside else rest).append(parameter)
    return [
        torch.optim.Muon(inside, lr=peak, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=peak, weight_decay=0.1, betas=(0.9, 0.95)),
    ]


def learning_rate(progress: float, num_steps: int, warm_up: int = WARM_UP_STEPS) -> float:
    """Compute the share of the peak learning rate at `progress` (0 to 1), after `num_steps` steps.

    It warms up, stays constant, and from one third on falls linearly to 0.
    """
    return min(1.0, (num_steps + 1) / warm_up, 1.5 * max(0.0, 1 - progress))


def take_step(
    loss_of_a_batch: Callable[[], torch.Tensor],
    module: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    rate: float,
) -> torch.Tensor:
    """Minimise the loss of one batch by one step, and return this loss."""
    loss = loss_of_a_batch()
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss
