"""Estimate of a drafter's acceptance in training: greedy chains over continuations by the target itself."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

from specsim.core.arguments import check_arguments
from specsim.core.errors import require, require_int
from specsim.core.limits import TokenId
from specsim.core.metrics import Acceptance, acceptance
from specsim.training.drafter import DrafterModule, Roots

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


@check_arguments
def continue_texts(
    target: LlamaForCausalLM, ids: Sequence[Sequence[TokenId]], temperature: int = 0
) -> list[Continuation]:
    """Continue texts, given by their token ids, by the target; InputError for no text and for an empty one."""
    require(ids and all(map(len, ids)), "ids", f"{len(ids)} texts", "texts of at least one token")
    width = max(map(len, ids))
    prompts_BC = torch.tensor([[0] * (width - len(row)) + list(row) for row in ids], device=target.device)
    mask_BC = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=target.device)
    longer_BC = continue_prompts(target, prompts_BC, mask_BC, NEW_TOKENS + NUM_DRAFTS + 1, temperature)
    return [Continuation(row_C[width - len(text) :], len(text)) for row_C, text in zip(longer_BC, ids, strict=True)]


@check_arguments
def estimate_acceptance(
    drafter: DrafterModule, target: LlamaForCausalLM, continuations: Sequence[Continuation], num_drafts: int = 3
) -> Acceptance:
    """Estimate the acceptance of greedy chains from the target's continuations, without an engine.

    On continuations at temperature 0 this is greedy acceptance. On samples, accepting a draft that equals the sampled
    token has the probability of target-only sampling: the draft's probability under the target. InputError for no
    continuation, and for chains longer than 4 or than the drafter's.
    """
    require(continuations, "continuations", len(continuations), "at least one")
    require_int("num_drafts", num_drafts, 1, min(NUM_DRAFTS, drafter.max_drafts or NUM_DRAFTS))
    rounds = []
    for continuation in continuations:
        tokens_C = continuation.tokens_C
        agrees = agreement(greedy_drafts(drafter, target, tokens_C, num_drafts), tokens_C)
        rounds += chain_rounds(agrees, continuation.prompt_len, num_drafts)
    return acceptance(rounds, num_drafts, num_drafts + 1)


@torch.no_grad()
def greedy_drafts(
    drafter: DrafterModule, target: LlamaForCausalLM, tokens_C: torch.Tensor, num_drafts: int
) -> torch.Tensor:
    """Draft after each token but the first and the last ones: target ids [rows, num_drafts]."""
    columns_BA = torch.arange(1, len(tokens_C) - num_drafts + 1, device=tokens_C.device)[None]
    roots = Roots(columns_BA, torch.full_like(columns_BA, num_drafts))
    drafts = drafter.drafts(drafter.read(target, tokens_C[None]), tokens_C[None], roots, num_drafts)
    ids = torch.stack([draft.logits_BAV[0].argmax(-1)[: columns_BA.shape[1]] for draft in drafts], 1)
    return ids if drafter.vocabulary is None else drafter.vocabulary[ids]


def agreement(drafts_RS: torch.Tensor, tokens_C: torch.Tensor) -> torch.Tensor:
    """Compare row r's draft of each depth with the text's own token: bool [rows, S], rows alike for every drafter."""
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
