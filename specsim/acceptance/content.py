"""Contents of a metrics file: its text, and its JSON values where it has any."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specsim.core.errors import InputError
from specsim.core.limits import MOST_COUNT, read_integer, read_number

STREAM_END = "[DONE]"


@dataclass(frozen=True, slots=True)
class Content:
    """A file that was read."""

    source: str  # its path
    text: str
    values: tuple[Any, ...]  # its JSON value, or one of each line; () for other text

    @classmethod
    def of_text(cls, text: str, source: str) -> "Content":
        """Parse a text that is one JSON value, or one a line, as in an event stream."""
        try:
            return cls(source, text, (json.loads(text),))
        except (ValueError, RecursionError):
            lines = [line.strip().removeprefix("data:").strip() for line in text.split("\n")]
            lines = [line for line in lines if line not in ("", STREAM_END)]
        try:
            return cls(source, text, tuple(map(json.loads, lines)))
        except (ValueError, RecursionError):
            return cls(source, text, ())

    def objects(self, *keys: str) -> Iterator[Mapping[str, Any]]:
        """Yield every JSON object, however deep, that has all of these keys."""
        waiting = list(reversed(self.values))
        while waiting:
            value = waiting.pop()
            if isinstance(value, Mapping):
                if all(value.get(key) is not None for key in keys):
                    yield value
                waiting += reversed(list(value.values()))
            elif isinstance(value, list):
                waiting += reversed(value)

    def count(self, value: Mapping[str, Any], *names: str, most: int = MOST_COUNT) -> int | None:
        """Read the count that the first of these keys has; None without any; InputError for another value."""
        for name in names:
            if value.get(name) is not None:
                return self.integer(name, value[name], most)
        return None

    def integer(self, name: str, value: object, most: int = MOST_COUNT) -> int:
        """Check a count, an integer of at least 0, which some tools write as a float."""
        return read_integer(value, name, self.source, 0, most)

    def number(self, name: str, value: object) -> float:
        """Check a number of at least 0."""
        return read_number(value, name, self.source)

    def mapping(self, name: str, value: object) -> Mapping[str, Any]:
        """Check a JSON object."""
        if isinstance(value, Mapping):
            return value
        raise InputError(name, type(value), f"a JSON object (in {self.source})")

    def items(self, name: str, value: object) -> list[Any]:
        """Check a JSON list."""
        if isinstance(value, list):
            return value
        raise InputError(name, type(value), f"a JSON list (in {self.source})")
