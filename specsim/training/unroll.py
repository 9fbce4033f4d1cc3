"""Unrolled training: a head reads its own output, as at inference, and learns from the target at every step.

B windows · C columns (tokens) of a window · R rows = C - unrolled steps · V vocabulary · H hidden · F target features.
Source: EAGLE-3 (arXiv 2503.01840), training-time test; the regression term is EAGLE-1's (arXiv 2401.15077).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from specsim.training.conventions import ENGINE, Conventions
from specsim.training.heads import Features, Head, Memory

STEP_WEIGHT = 0.9


class Step(NamedTuple):
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
    head: Head, features: Features, tokens_BC: torch.Tensor, steps: int, conventions: Conventions = ENGINE
) -> Iterator[Step]:
    """Run the head step by step; row r of step i predicts token r + i + 2."""
    rows = tokens_BC.shape[1] - steps
    memory: Memory = []
    hidden_BRH = head.first_hidden(features)[:, :rows]
    for step in range(steps):
        own_BRH = head(tokens_BC[:, step + 1 : step + 1 + rows], hidden_BRH, step, memory)
        logits_BRV, hidden_BRH = conventions.read_out(own_BRH, *head.readout)
        yield Step(own_BRH, logits_BRV)


@torch.no_grad()
def drafted_distribution(logits_BCV: torch.Tensor, vocabulary: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Restrict the target's distribution to a head's vocabulary; with whether its first choice is in it."""
    is_drafted_V = torch.zeros_like(logits_BCV[0, 0], dtype=torch.bool).index_fill(0, vocabulary, True)
    return logits_BCV[..., vocabulary].softmax(-1, dtype=torch.float32), is_drafted_V[logits_BCV.argmax(-1)]


def unrolled_loss(
    head: Head,
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
