"""Drafters in training: the drafts that they make after true tokens, and the files that they become.

B windows · C columns (tokens) of a window · A rows that draft · V vocabulary of drafts · H hidden.
The draft of depth d ≥ 1 after a root in column a is token a + d, whose distribution the target gives in column
a + d - 1.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import nn
from transformers import LlamaForCausalLM

from specsim.core.files import write_whole
from specsim.training.target import TargetReading, read_target

MASK_TOKEN = 0  # end of text, which no draft follows; drafts of all depths at once begin as it


class Roots(NamedTuple):
    """Tokens of windows after which blocks are drafted."""

    columns_BA: torch.Tensor  # i64, at least 1
    num_drafts_BA: torch.Tensor  # i64


class Drafts(NamedTuple):
    """Drafts of one depth, after true tokens."""

    logits_BAV: torch.Tensor
    columns_BA: torch.Tensor  # i64, columns of the target's distributions that they learn
    weights_BA: torch.Tensor  # f32, of the rows in the loss; 0: there is no draft
    hidden_BAH: torch.Tensor | None = None  # the drafter's output before its norm, where a later step reads it
    confidence_BA: torch.Tensor | None = None  # logit of the draft's acceptance

    def at_columns(self, values_BCX: torch.Tensor) -> torch.Tensor:
        """Gather the target's values of these columns: [B, A, X]."""
        return values_BCX[torch.arange(len(values_BCX), device=values_BCX.device)[:, None], self.columns_BA]


class DrafterModule(nn.Module, ABC):
    """A drafter in training, with the parameter names of published files."""

    config: Any  # of transformers
    feature_layers: Sequence[int] = ()  # target layers whose entering hidden states it reads
    max_drafts: int | None = None  # largest depth, where the architecture has one

    @property
    def vocabulary(self) -> torch.Tensor | None:
        """Target ids of the draft ids, i64 [V]; None: the whole vocabulary."""
        return None

    def read(self, target: LlamaForCausalLM, tokens_BC: torch.Tensor) -> TargetReading:
        """Run the target on windows."""
        return read_target(target, tokens_BC, self.feature_layers)

    @abstractmethod
    def drafts(self, reading: TargetReading, tokens_BC: torch.Tensor, roots: Roots, num_drafts: int) -> list[Drafts]:
        """Draft depths 1 to `num_drafts` after each root, or after each row where drafts are made one by one.

        The rows of every depth begin with those of the roots; true tokens serve as earlier drafts.
        """

    def auxiliary_loss(self, drafts: Drafts, prob_BAV: torch.Tensor, reading: TargetReading) -> torch.Tensor:
        """Compute what a drafter learns besides the target's distribution: a number."""
        return torch.zeros((), device=prob_BAV.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name the tensors of the file."""
        return self.state_dict()

    def write(self, folder: Path) -> None:
        """Write configuration and tensors in bfloat16; the parameters then hold the written values."""
        for parameter in self.parameters():
            parameter.data = parameter.data.bfloat16().float()
        self.config.dtype = torch.bfloat16
        self.config.save_pretrained(folder)
        tensors = {
            name: (value.bfloat16() if value.is_floating_point() else value).contiguous().cpu()
            for name, value in self.tensors().items()
        }
        write_whole(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}), "folder")

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def llama_fields(target: LlamaForCausalLM, **fields: Any) -> dict[str, Any]:
    """Fields of a drafter's config: its target's, and others in place of them."""
    return {**target.config.to_dict(), "tie_word_embeddings": False, **fields}


def drafts_of_rows(logits: Sequence[torch.Tensor]) -> list[Drafts]:
    """Drafts of depths 1, 2, ... by all rows: row r of depth d, with logits [B, R, V], learns column r + d."""
    drafts = []
    for depth, logits_BRV in enumerate(logits, 1):
        columns_BR = torch.arange(depth, depth + logits_BRV.shape[1], device=logits_BRV.device).expand(
            len(logits_BRV), -1
        )
        drafts.append(Drafts(logits_BRV, columns_BR, torch.ones_like(columns_BR, dtype=torch.float32)))
    return drafts
