"""Train a student for a target, on corpus text that the target continues itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from specsim.maintain.training.frozen_kv import build_frozen_kv
from specsim.maintain.training.minimise import Budget, minimise
from specsim.maintain.training.mtp import build_mtp
from specsim.maintain.training.recipe import Recipe
from specsim.maintain.training.standalone import build_standalone
from specsim.maintain.training.student import Student, distillation_loss, read_target
from specsim.maintain.training.target import sample_windows

PEAK_RATE = 4e-3
BUILDERS: dict[str, Callable[[LlamaForCausalLM, Recipe], Student]] = {
    "mtp": build_mtp,
    "frozen-kv": build_frozen_kv,
    "standalone": build_standalone,
}


def num_steps(name: str, recipe: Recipe) -> int:
    """Count the steps that training unrolls; a language model learns all columns in one."""
    return {"mtp": recipe.num_mtp_modules, "frozen-kv": recipe.frozen_kv_steps, "standalone": 1}[name]


def train_student(
    name: str,
    target: LlamaForCausalLM,
    tokens: torch.Tensor,
    rollouts: torch.Tensor,
    recipe: Recipe,
    budget: Budget,
    folder: Path,
) -> tuple[Student, dict[str, Any]]:
    """Train student `name` and write it to `folder`; the student returned holds the written bfloat16 values."""
    torch.manual_seed(2)
    student = BUILDERS[name](target, recipe).to(tokens.device)
    steps = num_steps(name, recipe)
    loss = torch.compile(distillation_loss, dynamic=False) if tokens.is_cuda else distillation_loss

    def loss_on(windows_BC: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            reading = read_target(target, windows_BC)
        return loss(student, reading, windows_BC, steps)

    def loss_of_a_batch() -> torch.Tensor:
        chosen = torch.randint(len(rollouts), (recipe.student_batch,), device=rollouts.device)
        on_rollouts = loss_on(rollouts[chosen, : recipe.rollout_rows + steps].long())
        if name != "standalone":
            return on_rollouts
        num_windows = max(1, recipe.student_batch * recipe.rollout_rows // (2 * recipe.target_window))
        return on_rollouts + loss_on(sample_windows(tokens, num_windows, recipe.target_window + 1)) / 2

    spent = minimise(loss_of_a_batch, student, PEAK_RATE, budget, name)
    student.write(folder)
    return student, {"parameters": student.num_parameters, **spent._asdict()}
