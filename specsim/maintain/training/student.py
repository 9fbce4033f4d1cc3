"""Students: drafters that learn a target's distribution from rollouts, whatever their architecture.

B windows · C columns (tokens) of a window · R rows · V vocabulary · H hidden · A key-value heads · D head dim.
Row r of unrolled step i predicts token r + i + 2: the root is token r + 1, and i drafts stand before the one predicted.
"""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaForCausalLM

STEP_WEIGHT = 0.9


class Reading(NamedTuple):
    """A target's outputs that students read."""

    hidden_BCH: torch.Tensor  # input of lm_head
    logits_BCV: torch.Tensor
    keys_BACD: torch.Tensor  # last layer's, with rope
    values_BACD: torch.Tensor  # last layer's


class Learner(nn.Module, ABC):
    """A drafter in training, which can be written."""

    config: Any  # of transformers

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name the tensors of the student's file."""
        return self.state_dict()

    def write(self, folder: Path) -> None:
        """Write configuration and tensors, in bfloat16; the parameters then hold the written values."""
        self.config.dtype = torch.bfloat16
        self.config.save_pretrained(folder)
        tensors = {name: value.bfloat16().contiguous() for name, value in self.tensors().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for parameter in self.parameters():
            parameter.data = parameter.data.bfloat16().float()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


class Student(Learner):
    """A drafter that is unrolled step by step."""

    @abstractmethod
    def unroll(self, reading: Reading, tokens_BC: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Compute each step's logits [B, R, V], with R = C - steps; true tokens serve as drafts."""


@torch.no_grad()
def read_target(target: LlamaForCausalLM, tokens_BC: torch.Tensor) -> Reading:
    """Run the target once."""
    output = target.model(input_ids=tokens_BC, use_cache=True)
    last = output.past_key_values.layers[-1]
    return Reading(output.last_hidden_state, target.lm_head(output.last_hidden_state), last.keys, last.values)


def distillation_loss(student: Student, reading: Reading, tokens_BC: torch.Tensor, steps: int) -> torch.Tensor:
    """Cross-entropy against the target's distribution, summed over the steps; later steps weigh less."""
    loss = torch.zeros((), device=tokens_BC.device)
    with torch.autocast(tokens_BC.device.type, torch.bfloat16, enabled=tokens_BC.is_cuda):
        for step, logits_BRV in enumerate(student.unroll(reading, tokens_BC, steps)):
            logits_BRV = logits_BRV.float()
            rows = logits_BRV.shape[1]
            target_prob_BRV = reading.logits_BCV[:, step + 1 : step + 1 + rows].softmax(-1, dtype=torch.float32)
            cross_entropy_BR = logits_BRV.logsumexp(-1) - (target_prob_BRV * logits_BRV).sum(-1)
            loss = loss + STEP_WEIGHT**step * cross_entropy_BR.mean()
    return loss
