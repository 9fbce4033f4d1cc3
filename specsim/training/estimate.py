"""Continuations of texts by the target, and the acceptance of a head's greedy chains over them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

from specsim.core.errors import require, require_int
from specsim.core.metrics import Acceptance, acceptance
from specsim.training.heads import UnrolledHead
from specsim.training.unroll import ENGINE, Conventions, read_features, unroll

NEW_TOKENS = 64
NUM_DRAFTS = 4


class Continuation(NamedTuple):
    """Token ids of a prompt and of the target's continuation."""

    tokens_C: torch.Tensor
    prompt_len: int

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens_C[self.prompt_len :][:NEW_TOKENS].tolist()


@torch.no_grad()
def continue_prompts(
    target: LlamaForCausalLM, prompts_BC: torch.Tensor, mask_BC: torch.Tensor, num_tokens: int, temperature: int
) -> torch.Tensor:
    """Append `num_tokens` tokens to left-padded prompts, greedily (temperature 0) or by sampling (1)."""
    return target.generate(  # pyright: ignore[reportAttributeAccessIssue]  # hidden by transformers' own protocol
        prompts_BC,
        attention_mask=mask_BC,
        do_sample=temperature == 1,
        **({"top_k": 0} if temperature else {}),
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        pad_token_id=0,
    )


def continue_texts(target: LlamaForCausalLM, ids: Sequence[Sequence[int]], temperature: int = 0) -> list[Continuation]:
    """Continue texts, given by their token ids, by the target."""
    width = max(map(len, ids))
    prompts_BC = torch.tensor([[0] * (width - len(row)) + list(row) for row in ids], device=target.device)
    mask_BC = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=target.device)
    longer_BC = continue_prompts(target, prompts_BC, mask_BC, NEW_TOKENS + NUM_DRAFTS + 1, temperature)
    return [
        Continuation(row_C[width - len(prompt) :], len(prompt)) for row_C, prompt in zip(longer_BC, ids, strict=True)
    ]


def estimate_acceptance(
    head: UnrolledHead,
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
    for continuation in continuations:
        agrees = agreement(head_drafts(head, target, continuation.tokens_C, conventions), continuation.tokens_C)
        rounds += chain_rounds(agrees, continuation.prompt_len, num_drafts)
    return acceptance(rounds, num_drafts, num_drafts + 1)


@torch.no_grad()
def head_drafts(
    head: UnrolledHead, target: LlamaForCausalLM, tokens_C: torch.Tensor, conventions: Conventions = ENGINE
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
