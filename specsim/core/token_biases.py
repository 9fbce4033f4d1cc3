"""Additions to logits by token id, as a value of sampling parameters."""

from collections.abc import Iterator, Mapping


class TokenBiases(Mapping[int, float]):
    """Additions to logits by token id, which unlike a mappingproxy can be hashed and pickled."""

    __slots__ = ("_bias",)

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = dict(bias)

    def __getitem__(self, token: int) -> float:
        return self._bias[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._bias)

    def __len__(self) -> int:
        return len(self._bias)

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))

    def __repr__(self) -> str:
        return repr(self._bias)
