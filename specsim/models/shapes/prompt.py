"""Random prompts, for pairs without a tokenizer."""

import torch

from specsim.core.errors import require_int


def random_prompt(vocab_size: int, length: int, seed: int = 0) -> list[int]:
    """Draw token ids, all equally likely."""
    require_int("prompt_length", length)
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
