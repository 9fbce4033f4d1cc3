"""Vocabularies of a target and a standalone drafter: which ids mean the same tokens."""

from pathlib import Path
from typing import Any

import torch

from specsim.core.errors import InputError
from specsim.core.target import ModelConfig
from specsim.models.checkpoint.tokenizer import LazyTokenizer, has_tokenizer

_SPACES = ("Ġ", "▁")  # of byte-level BPE, of SentencePiece
_SHOWN = 3


def vocabulary_map(target_tokenizer: Any, draft_tokenizer: Any) -> torch.Tensor:
    """Match tokens of two tokenizers: i64 [M, 2], target id and draft id, by ascending target id.

    A token begins with a space where its tokenizer marks one. Of ids with the same token the lowest counts (token-level
    intersection, arXiv 2502.05202).
    """
    target = _ids_by_text(target_tokenizer)
    draft = _ids_by_text(draft_tokenizer)
    pairs = sorted((target[text], draft[text]) for text in target.keys() & draft.keys())
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def check_vocabulary(target: ModelConfig, target_folder: Path, draft: ModelConfig, draft_folder: Path) -> None:
    """Check that every id means the same token to both models, as far as their folders say.

    Raises InputError with both sizes and the first ids that mean different tokens.
    """
    differing: list[str] = []
    if has_tokenizer(target_folder) and has_tokenizer(draft_folder):
        target_tokens, draft_tokens = (_tokens(LazyTokenizer(folder)) for folder in (target_folder, draft_folder))
        both = sorted(target_tokens.keys() & draft_tokens.keys())
        differing = [
            f"id {each} is {draft_tokens[each]!r}, not {target_tokens[each]!r}"
            for each in both
            if draft_tokens[each] != target_tokens[each]
        ]
    if differing or draft.vocab_size != target.vocab_size:
        value = "; ".join([f"{draft.vocab_size} tokens", *differing[:_SHOWN]])
        own = f"the target's vocabulary of {target.vocab_size} tokens, with equal ids"
        allowed = f"{own}, or any other one with bridge_vocabularies"
        raise InputError(f"the vocabulary of {draft_folder}", value, allowed)


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _ids_by_text(tokenizer: Any) -> dict[str, int]:
    """List the lowest id of every token, with a plain space in place of the tokenizer's mark at its beginning."""
    tokens = _tokens(tokenizer)
    mark = max(_SPACES, key=lambda space: sum(token.startswith(space) for token in tokens.values()))
    ids: dict[str, int] = {}
    for index in sorted(tokens):
        token = tokens[index]
        ids.setdefault(f" {token[1:]}" if token.startswith(mark) else token, index)
    return ids
