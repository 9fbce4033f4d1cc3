"""Limits of numbers in files and settings, and the check of a file's numbers."""

import math
import sys

from specsim.core.errors import InputError

MOST_LAYERS = 1024
MOST_EXPERTS = 4096
MOST_HEADS = 2**16
MOST_WIDTH = 2**24  # of hidden states, feed-forwards and vocabularies
MOST_STEPS = 1024  # of a round
MOST_RUNNING = 2**16  # requests of a batch
MOST_TOKENS = 2**31 - 1  # of a request or a pool: positions and slots are 32-bit integers
MOST_COUNT = 2**48  # of tokens, rounds or requests in a file
MOST_GPUS = 1024  # that share a simulated model
MOST_REQUESTS = 10_000_000  # of a simulation, whose arrays take some hundred bytes of each
MOST_JOBS = 1024  # processes of a command
LEAST_MAGNITUDE = 1e-30  # of an option that is not 0
_DIGITS = 18  # of integers that are converted exactly


def read_number(value: object, name: str, source: str, least: float = 0.0, most: float = math.inf) -> float:
    """Check a JSON number that a float holds.

    InputError names the key and its source: a file, or a line of one.
    """
    number = _finite(value)
    if number is None or not least <= number <= most:
        allowed = f"from {least:g} to {most:g}" if most < math.inf else f"of at least {least:g}"
        raise InputError(name, _printed(value), f"a number {allowed} (in {source})")
    return number


def read_positive(value: object, name: str, source: str) -> float:
    """Check a JSON number above 0, as read_number does."""
    number = _finite(value)
    if number is None or number <= 0:
        raise InputError(name, _printed(value), f"a number above 0 (in {source})")
    return number


def read_integer(value: object, name: str, source: str, least: int = 0, most: int = MOST_COUNT) -> int:
    """Check a JSON integer, which some tools write as a float (4.0); InputError as for read_number."""
    number = _finite(value)
    if number is None or number != int(number) or not least <= number <= most:
        allowed = f"of at least {least}" if most == MOST_COUNT else f"from {least} to {most:,}"
        raise InputError(name, _printed(value), f"an integer {allowed} (in {source})")
    return int(number)


def parse_number(text: str) -> float | str:
    """Convert a decimal number; another text stays as it is, for read_number to name."""
    try:
        if text.isdecimal() and len(text) <= _DIGITS:
            return int(text)
        return text if "_" in text else float(text)
    except ValueError:
        return text


def half_unit(text: str) -> float:
    """Give half of the last printed place of a number; 0 for an integer that is printed in full."""
    digits, _, exponent = text.lower().partition("e")
    places = len(digits.partition(".")[2])
    if not exponent:
        return 0.0 if not digits.partition(".")[2].strip("0") else 0.5 * 10.0**-places
    return 0.5 * 10.0 ** (int(exponent) - places)


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
        return None
    return float(value)


def _printed(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float)) else type(value)
