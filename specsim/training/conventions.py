"""Three lines that the trainer of a head and the engine that serves it must write alike.

B windows · C columns (tokens) of a window · R rows · V vocabulary · H hidden
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from specsim.core.errors import require_choice

CONVENTIONS = ("entering", "output")  # two ways in which the field counts feature layers
Value = TypeVar("Value")
Index = TypeVar("Index", int, torch.Tensor)


def label_column(row: Index, step: int) -> Index:
    """Find the column of the target whose distribution a row learns at an unrolled step.

    Row r of step i reads token r + i + 1. It drafts the token after it, r + i + 2, which the target predicts in column
    r + i + 1.
    """
    return row + step + 1


def feature_states(hidden_states: Sequence[Value], layers: Sequence[int], convention: str) -> list[Value]:
    """Choose the hidden states that a head reads, in the order of its layer ids.

    hidden_states: transformers' tuple; entry i enters layer i, so entry 0 is the embedding. convention: "entering" for
    ids of the layers that a state enters, "output" for ids of the layers that it leaves.
    """
    require_choice("convention", convention, CONVENTIONS)
    offset = 1 if convention == "output" else 0
    return [hidden_states[layer + offset] for layer in layers]


def read_out(
    hidden_BRH: torch.Tensor, norm: Callable[[torch.Tensor], Any], lm_head: Callable[[torch.Tensor], Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the logits of a step, and the hidden that the next step reads: the head's output *before* its norm."""
    return lm_head(norm(hidden_BRH)), hidden_BRH


@dataclass(frozen=True, slots=True)
class Conventions:
    """Functions that the trainer follows; others than these train a head that no engine serves well."""

    label_column: Callable[..., Any] = label_column
    feature_states: Callable[..., Any] = feature_states
    read_out: Callable[..., Any] = read_out


ENGINE = Conventions()  # as specsim's engines, SGLang and vLLM serve heads
