"""Estimate of acceptance in training: chains over continuations of the held-out prompts."""

from collections.abc import Callable
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from specsim.core.metrics import acceptance, is_loop
from specsim.maintain.training.student import Student, read_target
from specsim.training.estimate import NUM_DRAFTS, agreement, chain_rounds, continue_texts


@torch.no_grad()
def student_drafts(student: Student, target: LlamaForCausalLM, num_drafts: int, tokens_C: torch.Tensor) -> torch.Tensor:
    """Draft with a student after each token: ids [R, num_drafts]."""
    steps = student.unroll(read_target(target, tokens_C[None]), tokens_C[None], num_drafts)
    return torch.stack([logits_BRV[0].argmax(-1) for logits_BRV in steps], 1)


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
    ids = [tokenizer.encode(text).ids for text in texts]
    rows = []
    for temperature in (0, 1):
        continuations = continue_texts(target, ids, temperature)
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
