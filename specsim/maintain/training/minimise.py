"""Minimisation of a loss within a time budget: Muon for matrices in layers, AdamW for the rest."""

from collections.abc import Callable
from time import perf_counter

import torch
from torch import nn
from tqdm import tqdm

WARM_UP = 0.02
STEPS_A_REPORT = 10


def learning_rate(progress: float) -> float:
    """Compute the share of the peak learning rate at `progress` (0 to 1).

    It warms up, stays constant, and from one third on falls linearly to 0.
    """
    return min(1.0, (progress + 1e-4) / WARM_UP, 1.5 * max(0.0, 1 - progress))


def minimise(
    loss_of_a_batch: Callable[[], torch.Tensor], module: nn.Module, peak: float, seconds: float, label: str
) -> int:
    """Train `module` in place for `seconds` after its first step (which may compile); give the number of steps."""
    optimizers = _optimizers(module, peak)

    def step() -> torch.Tensor:
        loss = loss_of_a_batch()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss

    step().item()
    num_steps = 1
    start = perf_counter()
    with tqdm(total=round(seconds), desc=label, unit="s") as bar:
        while (elapsed := perf_counter() - start) < seconds:
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = peak * learning_rate(elapsed / seconds)
            loss = step()
            if num_steps % STEPS_A_REPORT == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", step=num_steps)
                bar.update(int(elapsed) - bar.n)
            num_steps += 1
    return num_steps


def _optimizers(module: nn.Module, peak: float) -> list[torch.optim.Optimizer]:
    inside = []
    rest = []
    for name, parameter in module.named_parameters():
        is_inside = parameter.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))
        (inside if is_inside else rest).append(parameter)
    rate = peak * learning_rate(0.0)
    return [
        torch.optim.Muon(inside, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate, weight_decay=0.1, betas=(0.9, 0.95)),
    ]
