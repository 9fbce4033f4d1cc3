"""Random prompts, for pairs without a tokenizer."""

import torch

from specsim.core.errors import InputError


def random_prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """Draw token ids, all equally likely."""
    if type(length) is not int or length < 1:
        raise InputError("prompt_length", length, "an integer of at least 1")
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
