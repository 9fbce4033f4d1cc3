"""Unrolled training: a head reads its own output, as at inference, and learns from the target at every step.

The functions of Conventions must be written alike in the trainer of a head and in the engine that serves it.

B windows · C columns (tokens) of a window · R rows = C - unrolled steps · V vocabulary · H hidden · F target features.
Source: EAGLE-3 (arXiv 2503.01840), training-time test; the regression term is EAGLE-1's (arXiv 2401.15077).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from specsim.core.errors import require_choice
from specsim.training.heads import Features, Memory, UnrolledHead

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


STEP_WEIGHT = 0.9


class UnrolledStep(NamedTuple):
    """Outputs of a head at one unrolled step."""

    hidden_BRH: torch.Tensor
    logits_BRV: torch.Tensor


@torch.no_grad()
def read_features(
    target: LlamaForCausalLM, tokens_BC: torch.Tensor, layers: Sequence[int], conventions: Conventions = ENGINE
) -> Features:
    """Run the target once; `layers` are named by the hidden state that enters them."""
    output = target.model(input_ids=tokens_BC, output_hidden_states=True, use_cache=False)
    last_BCH = output.last_hidden_state
    states = conventions.feature_states(output.hidden_states, layers, "entering")
    aux_BCF = torch.cat(states, -1) if states else last_BCH[..., :0]
    return Features(last_BCH, aux_BCF, target.lm_head(last_BCH))


def unroll(
    head: UnrolledHead, features: Features, tokens_BC: torch.Tensor, steps: int, conventions: Conventions = ENGINE
) -> Iterator[UnrolledStep]:
    """Run the head step by step; row r of step i predicts token r + i + 2."""
    rows = tokens_BC.shape[1] - steps
    memory: Memory = []
    hidden_BRH = head.first_hidden(features)[:, :rows]
    for step in range(steps):
        own_BRH = head(tokens_BC[:, step + 1 : step + 1 + rows], hidden_BRH, step, memory)
        logits_BRV, hidden_BRH = conventions.read_out(own_BRH, *head.readout)
        yield UnrolledStep(own_BRH, logits_BRV)


@torch.no_grad()
def drafted_distribution(logits_BCV: torch.Tensor, vocabulary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Restrict the target's distribution to a head's vocabulary; with whether its first choice is in it."""
    is_drafted_V = torch.zeros_like(logits_BCV[0, 0], dtype=torch.bool).index_fill(0, vocabulary, True)
    return logits_BCV[..., vocabulary].softmax(-1, dtype=torch.float32), is_drafted_V[logits_BCV.argmax(-1)]


def unrolled_loss(
    head: UnrolledHead,
    features: Features,
    tokens_BC: torch.Tensor,
    steps: int,
    regression: float,
    conventions: Conventions = ENGINE,
) -> torch.Tensor:
    """Cross-entropy against `drafted_distribution`, plus `regression` times a smooth L1 of features.

    Rows where the target's first choice is outside the head's vocabulary do not count.
    """
    loss = torch.zeros((), device=tokens_BC.device)
    row_R = torch.arange(tokens_BC.shape[1] - steps, device=tokens_BC.device)
    target_prob_BCV, counts_BC = drafted_distribution(features.logits_BCV, head.vocabulary)
    for step, (hidden_BRH, logits_BRV) in enumerate(unroll(head, features, tokens_BC, steps, conventions)):
        seen = conventions.label_column(row_R, step)
        logits_BRV = logits_BRV.float()
        cross_entropy_BR = logits_BRV.logsumexp(-1) - (target_prob_BCV[:, seen] * logits_BRV).sum(-1)
        term = (cross_entropy_BR * counts_BC[:, seen]).sum() / counts_BC[:, seen].sum()
        if regression:
            term = term + regression * F.smooth_l1_loss(hidden_BRH.float(), features.last_BCH[:, seen].float())
        loss = loss + STEP_WEIGHT**step * term
    return loss
