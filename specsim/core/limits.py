"""Ranges of numbers: limits and types of values that options, Python values and files share, and a file's numbers."""

import math
import sys
from dataclasses import dataclass
from typing import Annotated

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
MOST_REPLICATES = 2**16
MOST_JOBS = 1024  # processes of a command
LEAST_MAGNITUDE = 1e-30  # of an option that is not 0
_DIGITS = 18  # of integers that are converted exactly
_LARGE = 2**31 - 1  # from here on a limit is written as a power of two


@dataclass(frozen=True, slots=True)
class NumberRange:
    """A range of a number, the metadata of a type: of an argument, a field or an option (core.arguments)."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    remark: str = ""  # end of the sentence for a value out of range

    def __contains__(self, value: float) -> bool:
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        most = "" if self.at_most is None else _number(self.at_most)
        if self.above is not None:
            return f"above {_number(self.above)}" + (f", at most {most}" if most else "")
        if self.at_least is not None:
            return f"{_number(self.at_least)} to {most}" if most else f"at least {_number(self.at_least)}"
        return f"at most {most}" if most else ""

    def allowed(self, kind: str) -> str:
        """Word the range for an error: an integer from 0 to 8, a number above 0 and at most 1."""
        join = "from" if self.above is None and None not in (self.at_most, self.at_least) else "of"
        words = f"{kind} {join} {str(self).replace(', at most', ' and at most')}".replace(" of above", " above")
        return words + self.remark


def _number(value: float) -> str:
    if value >= _LARGE and value == 2 ** int(value).bit_length() - 1:
        return f"2^{int(value).bit_length()} - 1"
    return f"{value:g}" if isinstance(value, float) else str(value)


Probability = Annotated[float, NumberRange(0, 1)]
NonNegativeNumber = Annotated[float, NumberRange(at_least=0)]
Share = Annotated[float, NumberRange(at_most=1, above=0)]
PositiveNumber = Annotated[float, NumberRange(above=0)]
Seed = Annotated[int, NumberRange(0, 2**64 - 1)]
PositiveInteger = Annotated[int, NumberRange(at_least=1)]
StepCount = Annotated[int, NumberRange(0, MOST_STEPS)]  # of a round
_TOPK = ", drafts kept at each step (top_k is another: tokens kept by sampling)"
_TOP_K = ", tokens kept by sampling (topk is another: drafts kept at each step)"
TreeTopk = Annotated[int, NumberRange(at_least=1, remark=_TOPK)]
SamplingTopK = Annotated[int, NumberRange(at_least=0, remark=_TOP_K)]
TokenId = Annotated[int, NumberRange(0, MOST_TOKENS)]
TokenCount = Annotated[int, NumberRange(1, MOST_TOKENS)]
BatchSize = Annotated[int, NumberRange(1, MOST_RUNNING)]
RequestCount = Annotated[int, NumberRange(1, MOST_REQUESTS)]
GpuCount = Annotated[int, NumberRange(1, MOST_GPUS)]
ReplicateCount = Annotated[int, NumberRange(1, MOST_REPLICATES)]
JobCount = Annotated[int, NumberRange(1, MOST_JOBS)]
Width = Annotated[int, NumberRange(1, MOST_WIDTH)]
PageSize = Annotated[int, NumberRange(1, 2**16)]
Penalty = Annotated[float, NumberRange(-2, 2)]
RepetitionPenalty = Annotated[float, NumberRange(0.001, 1000)]


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
