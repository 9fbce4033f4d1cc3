"""What numbers of a description may be; anything else is bad input."""

import sys

from specsim.core.errors import InputError


def positive(name: str, value: object) -> None:
    """InputError unless a finite number above 0."""
    _number(name, value, lambda number: number > 0, "a number above 0")


def not_negative(name: str, value: object) -> None:
    """InputError unless a finite number of at least 0."""
    _number(name, value, lambda number: number >= 0, "a number of at least 0")


def share(name: str, value: object) -> None:
    """InputError unless above 0 and at most 1."""
    _number(name, value, lambda number: 0 < number <= 1, "a number above 0 and at most 1")


def whole(name: str, value: object, least: int = 1) -> None:
    """InputError unless an integer of at least `least`."""
    if type(value) is not int or value < least:
        raise InputError(name, value, f"an integer of at least {least}")


def _number(name: str, value: object, holds, allowed: str) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not (number and holds(value)):
        raise InputError(name, value, allowed)
