"""The error for bad input, the checks that raise it, and its text on a terminal: escaped, of limited length."""

import math
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import cache
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal, Self, get_args, get_origin

MOST_MESSAGE = 2000  # characters of a sentence
MOST_VALUE = 200  # characters of a value in an error
_USER = re.compile(r"(?<=://)[^\s'\"]*@")  # in an address, perhaps with a password
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")  # without tab and line break


def printable(text: str) -> str:
    """Escape, as Python does, characters that move the cursor, change the terminal or reverse the text."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shortened(text: str, most: int) -> str:
    """Leave out the middle of a text of more than `most` characters, between words where there are some."""
    if len(text) <= most:
        return text
    head, tail = text[: most // 2], text[-(most // 2) :]
    head = head[: head.rfind(" ") + 1] or head
    tail = tail[tail.find(" ") :] if " " in tail else tail
    return f"{head}... ({len(text) - len(head) - len(tail):,} more characters) ...{tail}"


def without_user(text: str) -> str:
    """Leave out user and password of the addresses in a text."""
    return _USER.sub("", text)


def tell(message: object) -> None:
    """Print a message as one sentence on standard error, without passwords of addresses."""
    text = printable(without_user(str(message))).replace("\n", "\\n").replace("\t", "\\t")
    print(f"specsim: {shortened(text, MOST_MESSAGE)}", file=sys.stderr)


class InputError(ValueError):
    """Bad input, in one sentence with the field, the value and what is allowed."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} is {shortened(text_of(repr, value), MOST_VALUE)}; allowed: {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed

    def within(self, file: str) -> "InputError":
        """Add the file that the value comes from, unless the sentence names it already."""
        return self if file in str(self) else InputError(self.name, self.value, f"{self.allowed} (in {file})")

    def __reduce__(self) -> tuple[type[Self], tuple[str, object, str]]:
        """Pickle by the fields, so that the error crosses from a worker process."""
        return type(self), (self.name, self.value, self.allowed)


def text_of(write: Callable[[object], str], value: object) -> str:
    """Write a value by str or repr, or its type where a user's own method of it fails."""
    try:
        return write(value)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return f"an object of type {type(value).__name__}"


def with_location(error: Exception) -> str:
    """Describe an error by its type, its text, and the file and line that raised it."""
    frame = extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}, line {frame.lineno})"


def incompleteness(error: Exception) -> str:
    """Say what a file of ours lacks, by the error of code that looked for it."""
    return f"it has no {error.args[0]}" if isinstance(error, KeyError) else "a field has a value of another kind"


class NotFinite(InputError):
    """Numbers of a model that are NaN or infinite, in one sentence with the request, the round and the place."""

    def __init__(self, model: str, dtype: str, request_id: int, round_number: int, part: str | None = None) -> None:
        is_narrow = dtype == "float16"
        advice = "use float32 or bfloat16" if is_narrow else "check the weights for NaN, infinity and too large numbers"
        super().__init__("dtype" if is_narrow else model, dtype, advice)
        self.model = model  # target or drafter
        self.dtype = dtype
        self.request_id = request_id
        self.round_number = round_number  # from 1; 0 is the prefill
        self.part = part  # first part of the model whose output is not finite; None: not located
        when = round_name(round_number)
        where = f"the {model}" if part is None else f"{part} of the {model}"
        self.args = (
            f"request {request_id}, {when}: {where} computes numbers that are not finite in {dtype}; {advice}",
        )

    def __reduce__(self) -> Any:
        return type(self), (self.model, self.dtype, self.request_id, self.round_number, self.part)


def round_name(number: int) -> str:
    """Name a round in texts, which count rounds from 0; number: from 1, and 0 for the prefill."""
    return f"round {number - 1}" if number else "prefill"


def require(condition: object, name: str, value: object, allowed: str) -> None:
    """Raise InputError unless the condition holds."""
    if not condition:
        raise InputError(name, value, allowed)


def require_type(name: str, value: object, kind: type, allowed: str) -> None:
    """Raise InputError unless the value is of this type.

    The error names the type of a value with a long repr.
    """
    if not isinstance(value, kind):
        raise InputError(name, value if value is None or isinstance(value, (str, int, float)) else type(value), allowed)


def require_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raise InputError unless the value is one of the choices."""
    require(value in choices, name, value, " or ".join(map(str, choices)))


def require_choices(value: Any) -> None:
    """Check every field of a dataclass that takes one of a few strings, or None besides."""
    for name, choices in _choices(type(value)):
        chosen = getattr(value, name)
        if chosen not in choices:
            require_choice(name, chosen, [choice for choice in choices if choice is not None])


@cache
def _choices(kind: type) -> list[tuple[str, list[object]]]:
    """List the fields of a dataclass that take one of a few strings, with these, and None where allowed."""
    rows: list[tuple[str, list[object]]] = []
    for field in fields(kind):
        kinds = (field.type,) if get_origin(field.type) is Literal else get_args(field.type)
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if choices:
            rows.append((field.name, [*choices, *([None] if type(None) in kinds else [])]))
    return rows


def require_int(name: str, value: object, least: int = 1, most: float = math.inf) -> int:
    """Return an integer (no bool) within the limits, or raise InputError."""
    if type(value) is not int or not least <= value <= most:
        if most == math.inf:
            raise InputError(name, value, f"an integer of at least {least}")
        limit = most if most < 2**31 - 1 else f"2^{int(most).bit_length()} - 1"
        raise InputError(name, value, f"an integer from {least} to {limit}")
    return value


def require_number(name: str, value: object, least: float, most: float, allowed: str) -> None:
    """Raise InputError unless the value is an integer or float (no bool, no nan) within the limits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    require(is_number, name, value, allowed)
