"""Estimate of a head's acceptance in training: greedy chains over continuations by the target."""

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM

from specsim.core.errors import require, require_int
from specsim.core.metrics import Acceptance, acceptance
from specsim.training.continuation import NUM_DRAFTS, Continuation
from specsim.training.conventions import ENGINE, Conventions
from specsim.training.heads import Head
from specsim.training.unroll import read_features, unroll


def estimate_acceptance(
    head: Head,
    target: LlamaForCausalLM,
    continuations: Sequence[Continuation],
    num_drafts: int = 3,
    conventions: Conventions = ENGINE,
) -> Acceptance:
    """Estimate the acceptance of greedy chains from the target's greedy continuations, without an engine.

    InputError for no continuation, or for chains longer than 4.
    """
    require(continuations, "continuations", len(continuations), "at least one")
    require_int("num_drafts", num_drafts, 1, NUM_DRAFTS)
    rounds = []
    for each in continuations:
        agrees = agreement(head_drafts(head, target, each.tokens_C, conventions), each.tokens_C)
        rounds += chain_rounds(agrees, each.prompt_len, num_drafts)
    return acceptance(rounds, num_drafts, num_drafts + 1)


@torch.no_grad()
def head_drafts(
    head: Head, target: LlamaForCausalLM, tokens_C: torch.Tensor, conventions: Conventions = ENGINE
) -> torch.Tensor:
    """Draft with an EAGLE head after each token: ids [R, NUM_DRAFTS]."""
    features = read_features(target, tokens_C[None], head.feature_layers, conventions)
    steps = unroll(head, features, tokens_C[None], NUM_DRAFTS, conventions)
    return torch.stack([head.vocabulary[step.logits_BRV[0].argmax(-1)] for step in steps], 1)


def agreement(drafts_RS: torch.Tensor, tokens_C: torch.Tensor) -> torch.Tensor:
    """Compare row r's draft of each step with the text's own token: bool [rows, S], rows alike for every drafter.

    On the target's greedy continuation this is greedy acceptance. On a sample, accepting a draft that equals the
    sampled token has the probability of target-only sampling: the draft's probability under the target.
    """
    rows = len(tokens_C) - NUM_DRAFTS - 1
    return torch.stack([draft_R[:rows] == tokens_C[step + 2 :][:rows] for step, draft_R in enumerate(drafts_RS.T)], 1)


def chain_rounds(agrees: torch.Tensor, first_root: int, num_drafts: int) -> list[int]:
    """Count the accepted drafts of each round of a chain; the first round's root is token `first_root`."""
    accepted = agrees[:, :num_drafts].int().cumprod(1).sum(1).tolist()
    rounds = []
    root = first_root
    while root - 1 < len(accepted):
        rounds.append(accepted[root - 1])
        root += rounds[-1] + 1
    return rounds
