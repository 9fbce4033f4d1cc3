"""Lists of the tokens that a drafter drafts from: read, counted in a text, and written with the tokens' texts.

FR-Spec (arXiv 2502.14856) takes the most frequent tokens of a corpus; SGLang reads such a list, a `.pt` file of ids, by
`--speculative-token-map`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from specsim.core.arguments import check_arguments
from specsim.core.errors import InputError, require
from specsim.core.files import parse_json, read_text, write_json
from specsim.core.limits import parse_number
from specsim.models.checkpoint.vocabulary import tokens_by_id

_NAME = "draft_vocab"
_ALLOWED = "a file of token ids: a JSON list, one id a line, SGLang's .pt, or what DraftVocabulary.write writes"


@check_arguments
@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Target ids that a drafter drafts from.

    With the tokens' texts, a list of another tokenizer is noticed, even if its vocabulary has the same size.
    """

    token_ids: tuple[int, ...]  # ascending
    tokens: tuple[str, ...] = ()  # of the same ids, as the target's tokenizer has them; (): not known

    def __post_init__(self) -> None:
        require(self.token_ids, _NAME, [], "at least one token id")
        order = sorted(range(len(self.token_ids)), key=self.token_ids.__getitem__)
        ids = tuple(self.token_ids[index] for index in order)
        twice = next((one for one, other in pairwise(ids) if one == other), None)
        require(twice is None, _NAME, f"token id {twice} twice", "different token ids")
        require(ids[0] >= 0, _NAME, ids[0], "token ids of at least 0")
        has_tokens = len(self.tokens) in (0, len(ids))
        require(has_tokens, "tokens", len(self.tokens), f"none, or a text for each of {len(ids)} ids")
        object.__setattr__(self, "token_ids", ids)
        object.__setattr__(self, "tokens", tuple(self.tokens[index] for index in order) if self.tokens else ())

    @classmethod
    def most_frequent(cls, tokenizer: Any, text: str, size: int) -> Self:
        """Count a text's tokens, and take the `size` most frequent; of equal counts the lower id.

        tokenizer: of the target. Raises InputError for a text with fewer different tokens.
        """
        counts = Counter(tokenizer.encode(text, add_special_tokens=False))
        most = f"1 to {len(counts):,}, the different tokens of the text"
        require(1 <= size <= len(counts), "draft_vocab_size", size, most)
        ids = sorted(counts, key=lambda token: (-counts[token], token))[:size]
        texts = tokens_by_id(tokenizer)
        return cls(tuple(ids), tuple(texts[token] for token in ids) if all(map(texts.__contains__, ids)) else ())

    @classmethod
    def of(cls, source: "DraftVocabulary | Sequence[int] | str | Path") -> "DraftVocabulary":
        """Read a file, or take ids."""
        if isinstance(source, DraftVocabulary):
            return source
        return cls.read(Path(source)) if isinstance(source, (str, Path)) else cls(tuple(map(int, source)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file in one of the forms above; raises InputError for any other."""
        if path.suffix == ".pt":
            return cls(_read_tensor(path))
        text = read_text(path, _NAME, _ALLOWED)
        if text.lstrip()[:1] in ("[", "{"):
            value = parse_json(text, _NAME, str(path), _ALLOWED)
            if isinstance(value, Mapping):
                return cls(_ids(list(value.values()), path), tuple(value))
            return cls(_ids(value, path))
        return cls(_ids(list(map(parse_number, text.split())), path))

    def write(self, path: Path) -> None:
        """Write a JSON object from each token to its id; raises InputError where the tokens are not known."""
        require(self.tokens, "tokens", 0, "the texts of all ids, as most_frequent and such a file have them")
        write_json(path, dict(zip(self.tokens, self.token_ids, strict=True)))

    def check(self, vocab_size: int, tokenizer: Any) -> None:
        """Raise InputError for ids beyond a target's vocabulary, and for tokens that are others in its tokenizer.

        tokenizer: None where the target has none, so that texts cannot be compared.
        """
        largest = self.token_ids[-1]
        require(largest < vocab_size, _NAME, f"token id {largest}", f"ids of the target, 0 to {vocab_size - 1}")
        texts = tokens_by_id(tokenizer) if self.tokens and tokenizer is not None else {}
        for token_id, token in zip(self.token_ids, self.tokens, strict=False):
            if texts.get(token_id, token) != token:
                allowed = f"a list of this target's tokens, whose tokenizer has {texts[token_id]!r} as id {token_id}"
                raise InputError(_NAME, f"{token!r} as id {token_id}", allowed)


def _ids(values: Any, path: Path) -> tuple[int, ...]:
    is_list = isinstance(values, list) and all(type(value) is int for value in values)
    require(is_list, _NAME, str(path), _ALLOWED)
    return tuple(values)


def _read_tensor(path: Path) -> tuple[int, ...]:
    """Read a list or a tensor of ids, without running code of the file."""
    import torch

    try:
        value = torch.load(path, weights_only=True, map_location="cpu")
        values = value.flatten().tolist() if isinstance(value, torch.Tensor) else list(value)
    except Exception as error:  # of the file system, of zip and of pickle
        raise InputError(_NAME, str(path), f"{_ALLOWED} ({type(error).__name__})") from error
    return _ids(values, path)
