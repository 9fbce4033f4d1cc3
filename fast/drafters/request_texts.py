"""A structure over each request's tokens, extended as the request grows."""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class TextStructure(Protocol):
    """A structure over a text."""

    text: list[int]

    def append(self, token: int) -> None:
        """Add a token to the text."""
        ...


AnyStructure = TypeVar("AnyStructure", bound=TextStructure)


class RequestTexts(Generic[AnyStructure]):
    """One structure for each request."""

    def __init__(self, make: Callable[[], AnyStructure]) -> None:
        self._make = make
        self._structures: dict[int, AnyStructure] = {}

    def follow(self, request_id: int, tokens: Sequence[int]) -> AnyStructure:
        """Extend the request's structure to these tokens.

        It is made again if its text is no prefix of them, for instance because another run reuses the request id.
        """
        structure = self._structures.get(request_id)
        if structure is None or list(tokens[: len(structure.text)]) != structure.text:
            structure = self._structures[request_id] = self._make()
        for token in tokens[len(structure.text) :]:
            structure.append(token)
        return structure

    def drop(self, request_id: int) -> None:
        """Forget a request, known or not."""
        self._structures.pop(request_id, None)
