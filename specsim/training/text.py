"""Texts to train on, and texts that are held out."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from specsim.training.train import join_texts

HELD_OUT_ONE_IN = 16
MOST_PROMPTS = 16
PROMPT_TOKENS = 96


class SplitText(NamedTuple):
    """Token ids to train on, and beginnings of texts that are held out."""

    tokens_T: torch.Tensor
    prompts: list[list[int]]


def split_texts(texts: Sequence[str], tokenizer: Any, separator: int) -> SplitText:
    """Encode texts; one of 16 is held out, of a single text the last sixteenth."""
    ids = [tokenizer.encode(text) for text in texts]
    if len(ids) < HELD_OUT_ONE_IN:
        (tokens,) = ids if len(ids) == 1 else (join_texts(ids, separator).tolist(),)
        start = len(tokens) - len(tokens) // HELD_OUT_ONE_IN
        heldout = [tokens[first : first + PROMPT_TOKENS] for first in range(start, len(tokens), PROMPT_TOKENS)]
        return SplitText(torch.tensor(tokens[:start]), _prompts(heldout))
    heldout = ids[HELD_OUT_ONE_IN - 1 :: HELD_OUT_ONE_IN]
    kept_ids = [text for number, text in enumerate(ids, 1) if number % HELD_OUT_ONE_IN]
    return SplitText(join_texts(kept_ids, separator), _prompts(heldout))


def _prompts(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    prompts = [list(text[:PROMPT_TOKENS]) for text in texts if len(text) > 1]
    return prompts[:MOST_PROMPTS]
