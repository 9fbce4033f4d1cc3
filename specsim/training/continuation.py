"""Continuations of texts by the target itself, on which acceptance is estimated and heads are trained."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

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
    return [Continuation(row_C[width - len(own) :], len(own)) for row_C, own in zip(longer_BC, ids, strict=True)]
