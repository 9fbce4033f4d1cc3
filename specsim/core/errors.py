"""Bad input, reported in one sentence, and the checks that find it."""

import math
from typing import Self


class InputError(ValueError):
    """Bad input: one sentence naming the field, the value and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} is {value!r}; allowed: {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[Self], tuple[str, object, str]]:
        """Pickle by its fields, so that it crosses from a worker process."""
        return type(self), (self.name, self.value, self.allowed)


def require(condition: bool, name: str, value: object, allowed: str) -> None:
    """Raise InputError unless the condition holds."""
    if not condition:
        raise InputError(name, value, allowed)


def require_int(name: str, value: object, least: int, most: float = math.inf) -> None:
    """Raise InputError unless the value is an integer (no bool) within limits."""
    limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
    require(type(value) is int and least <= value <= most, name, value, f"an integer {limits}")


def require_number(name: str, value: object, least: float, most: float, allowed: str) -> None:
    """Raise InputError unless the value is an integer or float (no bool, no nan) within limits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    require(is_number, name, value, allowed)
