"""Random prompts, for pairs without a tokenizer."""

import torch


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Draw uniformly random token ids, the same ones in every run."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (count, length), generator=generator).tolist()
