"""Tokenizer of a checkpoint's folder, loaded at first use."""

from pathlib import Path
from typing import Any

from specsim.core.errors import InputError

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
        return self._tokenizer().encode(text, **{"verbose": False, **options})

    def decode(self, token_ids: Any, **options: Any) -> str:
        return self._tokenizer().decode(token_ids, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._tokenizer(), name)

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
            except Exception as error:  # errors of transformers and tokenizers share no class
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                name = f"the tokenizer in {self.folder}"
                raise InputError(name, reason, "a tokenizer that transformers loads") from error
        return self._loaded

    def __repr__(self) -> str:
        return f"LazyTokenizer({str(self.folder)!r})"
