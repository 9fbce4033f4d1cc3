"""Fields of a JSON file, read by name and type, with errors that name field and file."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specsim.core.errors import InputError, require
from specsim.core.limits import MOST_WIDTH


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields of one JSON object, in which null counts as absent."""

    file: Path
    values: Mapping[str, Any]
    read_names: set[str] = field(default_factory=set)  # every name that was read, to find misspelt ones

    def get(self, name: str, default: Any = None) -> Any:
        """Read a field of any type, or its default."""
        self.read_names.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def error(self, name: str, allowed: str) -> InputError:
        """Make the error for a field's value."""
        return InputError(f"{name} in {self.file}", self.get(name, "missing"), allowed)

    @property
    def non_null(self) -> dict[str, Any]:
        """Fields that are not null."""
        return {name: value for name, value in self.values.items() if value is not None}

    def filled(self, defaults: Mapping[str, Any]) -> "Fields":
        """Add `defaults` for fields that are absent, but not for null ones."""
        return Fields(self.file, {**defaults, **self.values}, self.read_names)

    def replaced(self, values: Mapping[str, Any]) -> "Fields":
        """Replace fields by `values` of the same names."""
        return Fields(self.file, {**self.values, **values}, self.read_names)

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MOST_WIDTH) -> int:
        """Read an integer of at least `least` and at most `most`, or raise InputError."""
        value = self.get(name, default)
        if type(value) is not int or value < least:
            raise self.error(name, f"an integer of at least {least}")
        if value > most:
            raise self.error(name, f"at most {most:,}, more than any model has")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Read a positive number, or raise InputError."""
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise self.error(name, "a positive number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Read a boolean, or raise InputError."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
        """Read one of the allowed strings, or raise InputError."""
        value = self.get(name, default)
        if value not in allowed:
            raise self.error(name, " or ".join(allowed))
        return value

    def mapping(self, name: str) -> "Fields":
        """Read an object, empty if absent, or raise InputError."""
        value = self.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(self.file, value, self.read_names)


def read_json(file: Path) -> Fields:
    """Read the object in a JSON file."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(str(file), "missing", "a JSON file, as Hugging Face checkpoints have it") from None
    except OSError as error:
        raise InputError(str(file), error.strerror, "a file that can be read") from error
    except (ValueError, RecursionError) as error:
        raise InputError(str(file), str(error), "valid JSON") from error
    require(isinstance(values, dict), str(file), type(values).__name__, "a JSON object")
    return Fields(file, values)
