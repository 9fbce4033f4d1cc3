"""Bad input, told in one sentence."""


class InputError(ValueError):
    """Bad input: one sentence naming the field, the value and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str):
        super().__init__(f"{name} is {value!r}; allowed: {allowed}")
        self.name, self.value, self.allowed = name, value, allowed

    def __reduce__(self):
        """So that it crosses from a worker process to whoever waits for it."""
        return InputError, (self.name, self.value, self.allowed)
