"""Contents of a metrics file: its text, and its JSON values where it has any."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from specsim.core.errors import InputError
from specsim.simulator.bounds import is_number

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

    def count(self, value: Mapping[str, Any], *names: str) -> int | None:
        """Read the count that the first of these keys has; None without any; InputError for another value."""
        for name in names:
            if value.get(name) is not None:
                return self.whole(name, value[name])
        return None

    def whole(self, name: str, value: object) -> int:
        """Check a count, an integer of at least 0, which some tools write as a float."""
        if is_number(value) and value >= 0 and value == int(value):
            return int(value)
        raise InputError(name, value, f"an integer of at least 0 (in {self.source})")

    def number(self, name: str, value: object) -> float:
        """Check a number of at least 0."""
        if is_number(value) and value >= 0:
            return float(value)
        raise InputError(name, value, f"a number of at least 0 (in {self.source})")
