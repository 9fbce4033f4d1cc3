"""Tokenizers and vocabularies of a target and its drafter, and the bridge between different ones.

A language model with another vocabulary drafts the tokens that its target has too (arXiv 2502.05202, TLI). Heads with
fewer tokens have the tables d2t (i64, target id = i + d2t[i]) and t2d (bool).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from specsim.core.errors import InputError, require
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig
from specsim.core.user_module import user_code

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer."""
    return any((folder / name).exists() for name in _FILES)


class LazyTokenizer:
    """Tokenizer with every attribute of transformers' AutoTokenizer, loaded at first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: Any = None

    def encode(self, text: str, **options: Any) -> list[int]:
        with self._calls():
            return self._tokenizer().encode(text, **{"verbose": False, **options})

    def decode(self, token_ids: Any, **options: Any) -> str:
        with self._calls():
            return self._tokenizer().decode(token_ids, **options)

    def _calls(self) -> AbstractContextManager[None]:
        """Turn errors of the libraries, panics of Rust included, into an InputError."""
        return user_code(f"the tokenizer in {self.folder}", "broken", "a tokenizer that transformers loads and runs")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tokenizer(), name)

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            from transformers import AutoTokenizer

            with self._calls():
                self._loaded = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        return self._loaded

    def __repr__(self) -> str:
        return f"LazyTokenizer({str(self.folder)!r})"


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
        target_tokens, draft_tokens = (tokens_by_id(LazyTokenizer(folder)) for folder in (target_folder, draft_folder))
        both = sorted(target_tokens.keys() & draft_tokens.keys())
        differing = [
            f"id {token_id} is {draft_tokens[token_id]!r}, not {target_tokens[token_id]!r}"
            for token_id in both
            if draft_tokens[token_id] != target_tokens[token_id]
        ]
    if differing or draft.vocab_size != target.vocab_size:
        value = "; ".join([f"{draft.vocab_size} tokens", *differing[:_SHOWN]])
        target_vocabulary = f"the target's vocabulary of {target.vocab_size} tokens, with equal ids"
        allowed = f"{target_vocabulary}, or any other one with bridge_vocabularies"
        raise InputError(f"the vocabulary of {draft_folder}", value, allowed)


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """List the text of every token, as the tokenizer has it."""
    return {index: token for token, index in tokenizer.get_vocab().items()}


def _ids_by_text(tokenizer: Any) -> dict[str, int]:
    """List the lowest id of every token, with a plain space in place of the tokenizer's mark at its beginning."""
    tokens = tokens_by_id(tokenizer)
    mark = max(_SPACES, key=lambda space: sum(token.startswith(space) for token in tokens.values()))
    ids: dict[str, int] = {}
    for index in sorted(tokens):
        token = tokens[index]
        ids.setdefault(f" {token[1:]}" if token.startswith(mark) else token, index)
    return ids


_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def bridge_vocabularies(
    drafter: DrafterCheckpoint, draft_folder: Path, target: ModelConfig, target_folder: Path
) -> DrafterCheckpoint:
    """Bridge to the target's vocabulary, by the tokenizers of both folders.

    The drafter reads its unknown token, or its token 0 if it has none, in place of a token that it does not have.
    Raises InputError where a folder has no tokenizer, or the two have no token in common.
    """
    for folder in (target_folder, draft_folder):
        allowed = f"True where both models have a tokenizer, and there is none in {folder}"
        require(has_tokenizer(folder), "bridge_vocabularies", True, allowed)
    tokenizer = LazyTokenizer(draft_folder)
    pairs = vocabulary_map(LazyTokenizer(target_folder), tokenizer)
    size = drafter.config.model.vocab_size
    pairs = pairs[(pairs < torch.tensor([target.vocab_size, size])).all(1)]
    if not len(pairs):
        name = f"the number of tokens that {draft_folder} and {target_folder} have in common"
        raise InputError(name, 0, "at least 1, for a bridge of their vocabularies")
    unknown = tokenizer.unk_token_id
    return bridge(drafter, target, pairs, unknown if unknown is not None and unknown < size else 0)


def bridge(drafter: DrafterCheckpoint, target: ModelConfig, pairs: torch.Tensor, stand_in: int) -> DrafterCheckpoint:
    """Give a language model the ids of its target.

    pairs: i64 [M, 2], target and draft id of every common token, by ascending target id.
    The embedding gets a row for each target id: that of the same token, or of draft id `stand_in` if there is none.
    The head keeps the rows of the M common tokens, and their softmax is the distribution that drafts are drawn from.
    """
    target_ids_M, draft_ids_M = pairs.unbind(1)
    rows_V = torch.full((target.vocab_size,), stand_in).index_put((target_ids_M,), draft_ids_M)
    tensors = {
        **drafter.tensors,
        _EMBEDDING: drafter.tensors[_EMBEDDING][rows_V],
        _HEAD: drafter.tensors[_HEAD][draft_ids_M],
        "d2t": target_ids_M - torch.arange(len(pairs)),
        "t2d": torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, target_ids_M, True),
    }
    model = replace(
        drafter.config.model,
        vocab_size=target.vocab_size,
        tie_word_embeddings=False,
        eos_token_ids=target.eos_token_ids,
    )
    return DrafterCheckpoint(replace(drafter.config, model=model, draft_vocab_size=len(pairs)), tensors)


def with_vocabulary(tensors: Mapping[str, torch.Tensor], folder: Path, vocab_size: int) -> dict[str, torch.Tensor]:
    """Convert d2t, where there is one, to i64 and t2d to bool, and check that they are inverse.

    t2d is made where the files have only d2t. Target ids ascend with draft ids, so that ties and sums over a
    distribution are the same in either numbering.
    """
    if "d2t" not in tensors:
        return dict(tensors)
    d2t = tensors["d2t"].long()
    target_ids = d2t + torch.arange(len(d2t))
    outside = ((target_ids < 0) | (target_ids >= vocab_size)).nonzero().flatten().tolist()
    if outside:
        allowed = f"an offset to a target id of 0 to {vocab_size - 1}"
        raise InputError(f"d2t[{outside[0]}] in {folder}", int(d2t[outside[0]]), allowed)
    falling = (target_ids.diff() <= 0).nonzero().flatten().tolist()
    if falling:
        before = int(target_ids[falling[0]])
        index = falling[0] + 1
        allowed = f"an offset to a target id above {before}, that of draft id {index - 1}"
        raise InputError(f"d2t[{index}] in {folder}", int(d2t[index]), allowed)
    t2d = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, target_ids, True)
    differing = (tensors.get("t2d", t2d).bool() != t2d).nonzero().flatten().tolist()
    if differing:
        allowed = f"{t2d[differing[0]].item()}, as d2t has it"
        raise InputError(f"t2d[{differing[0]}] in {folder}", not t2d[differing[0]].item(), allowed)
    return {**tensors, "d2t": d2t, "t2d": t2d}
