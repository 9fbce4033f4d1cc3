"""Bad input, reported in one sentence."""

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
