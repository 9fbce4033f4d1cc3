"""Minimisation of a loss within a time budget, in one run or several, by Muon and AdamW."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from specsim.training.train import learning_rate, make_optimizers, take_step

STEPS_A_REPORT = 10
SECONDS_A_CHECKPOINT = 60.0


@dataclass(frozen=True, slots=True)
class Budget:
    """Training time of a model; compilation counts."""

    seconds: float  # of all runs together
    slice_seconds: float | None  # of this run at most; None: all that is left
    checkpoint: Path  # file from which the next run continues


class Spent(NamedTuple):
    """Training done so far, by all runs."""

    steps: int
    seconds: float


def minimise(
    loss_of_a_batch: Callable[[], torch.Tensor], module: nn.Module, peak: float, budget: Budget, label: str
) -> Spent:
    """Train `module` in place, from the budget's checkpoint if it fits, until the budget or its slice is used up."""
    optimizers = make_optimizers(module, peak)
    before = _resume(module, optimizers, budget.checkpoint)
    left = budget.seconds - before.seconds
    limit = left if budget.slice_seconds is None else min(left, budget.slice_seconds)
    steps = before.steps
    saved = elapsed = 0.0
    start = perf_counter()
    with tqdm(total=round(max(limit, 0)), desc=label, unit="s") as bar:
        while elapsed < limit:
            rate = peak * learning_rate((before.seconds + elapsed) / budget.seconds, steps)
            loss = take_step(loss_of_a_batch, module, optimizers, rate)
            steps += 1
            if steps % STEPS_A_REPORT == 0:
                bar.set_postfix(loss=f"{loss.item():.3f}", step=steps)
                bar.update(int(elapsed) - bar.n)
            elapsed = perf_counter() - start
            if elapsed - saved > SECONDS_A_CHECKPOINT:
                _save(module, optimizers, Spent(steps, before.seconds + elapsed), budget.checkpoint)
                saved = elapsed
    spent = Spent(steps, before.seconds + elapsed)
    _save(module, optimizers, spent, budget.checkpoint)
    return spent


def _save(module: nn.Module, optimizers: list[torch.optim.Optimizer], spent: Spent, path: Path) -> None:
    """Write a checkpoint whole or not at all."""
    partial = path.with_suffix(".partial")
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"module": module.state_dict(), "optimizers": states, **spent._asdict()}, partial)
    partial.replace(path)


def _resume(module: nn.Module, optimizers: list[torch.optim.Optimizer], path: Path) -> Spent:
    """Load a checkpoint of a module of the same shapes; nothing is spent where there is none."""
    if not path.exists():
        return Spent(0, 0.0)
    device = next(module.parameters()).device
    found = torch.load(path, map_location=device, weights_only=True)
    if _shapes(found["module"]) != _shapes(module.state_dict()):
        tqdm.write(f"{path} is of another model: training starts over")
        return Spent(0, 0.0)
    module.load_state_dict(found["module"])
    for optimizer, state in zip(optimizers, found["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    torch.manual_seed(found["steps"])  # the next batches are not the first ones again
    tqdm.write(f"{path}: continuing after {found['steps']} steps in {found['seconds']:.0f} s; delete it to start over")
    return Spent(found["steps"], found["seconds"])


def _shapes(state: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in state.items()}
