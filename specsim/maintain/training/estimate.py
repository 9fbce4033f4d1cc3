"""Estimate of acceptance in training: chains over continuations of the held-out prompts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from specsim.core.metrics import acceptance, is_loop
from specsim.maintain.training.heads import Head
from specsim.maintain.training.rollouts import continue_prompts
from specsim.maintain.training.student import Student, read_target
from specsim.maintain.training.unroll import read_features, unroll

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
def head_drafts(head: Head, target: LlamaForCausalLM, layers: Sequence[int], tokens_C: torch.Tensor) -> torch.Tensor:
    """Draft with an EAGLE head after each token: ids [R, NUM_DRAFTS]."""
    steps = unroll(head, read_features(target, tokens_C[None], layers), tokens_C[None], NUM_DRAFTS)
    return torch.stack([head.vocabulary[step.logits_BRV[0].argmax(-1)] for step in steps], 1)


@torch.no_grad()
def student_drafts(student: Student, target: LlamaForCausalLM, num_drafts: int, tokens_C: torch.Tensor) -> torch.Tensor:
    """Draft with a student after each token: ids [R, num_drafts]."""
    steps = student.unroll(read_target(target, tokens_C[None]), tokens_C[None], num_drafts)
    return torch.stack([logits_BRV[0].argmax(-1) for logits_BRV in steps], 1)


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


def continue_texts(
    target: LlamaForCausalLM, tokenizer: Tokenizer, texts: list[str], temperature: int
) -> list[Continuation]:
    """Continue texts by the target."""
    ids = [tokenizer.encode(text).ids for text in texts]
    width = max(map(len, ids))
    prompts_BC = torch.tensor([[0] * (width - len(row)) + row for row in ids], device=target.device)
    mask_BC = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids], device=target.device)
    longer_BC = continue_prompts(target, prompts_BC, mask_BC, NEW_TOKENS + NUM_DRAFTS + 1, temperature)
    return [Continuation(row_C[width - len(own) :], len(own)) for row_C, own in zip(longer_BC, ids, strict=True)]


def estimate(
    drafts_of: Callable[[torch.Tensor], torch.Tensor],
    target: LlamaForCausalLM,
    tokenizer: Tokenizer,
    texts: list[str],
) -> list[dict[str, Any]]:
    """Summarise chains of 3 and 4 drafts at temperature 0 and 1, with and without looping prompts.

    `drafts_of` gives the drafts [R, S] after each token of a text; a drafter of fewer steps has no chain of 4.
    """
    torch.manual_seed(3)
    rows = []
    for temperature in (0, 1):
        continuations = continue_texts(target, tokenizer, texts, temperature)
        agreements = [agreement(drafts_of(each.tokens_C), each.tokens_C) for each in continuations]
        straight = [index for index, each in enumerate(continuations) if not is_loop(each.new_tokens)]
        groups = {f"all {len(texts)}": range(len(texts)), f"{len(straight)} that do not loop": straight}
        lengths = [length for length in (3, NUM_DRAFTS) if length <= agreements[0].shape[1]]
        for num_drafts, (group, chosen) in product(lengths, groups.items()):
            rounds = [
                accepted
                for index in chosen
                for accepted in chain_rounds(agreements[index], continuations[index].prompt_len, num_drafts)
            ]
            figures = acceptance(rounds, num_drafts, num_drafts + 1)
            rows.append({"temperature": temperature, "prompts": group, **asdict(figures)})
    return rows
