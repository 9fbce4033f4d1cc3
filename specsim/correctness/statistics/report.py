"""Results of sampling tests and their printed form."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from specsim.core.display import heading, paragraph, print_table
from specsim.correctness.statistics.e_value import ChiSquare

INTRODUCTION = (
    "A small-vocabulary target whose distribution is known exactly (16 tokens; each depends on the two before it), a "
    "drafter that prefers tokens of low target probability, and whole engines: requests, KV slots, drafts, verify, "
    "commit. Every token is tested against its distribution given the tokens before it, and once more those that begin "
    "a round. p: an upper bound, for any number of tokens. Chi-square / df is near 1 for a correct engine. Detects: "
    "the least total variation, spread over all contexts, that the test would have rejected with probability 0.99."
)
COLUMNS = ("verifier", "impl", "sampling", "tokens", "round starts", "length", "chi²/df", "p at most", "detects")
CONTROL_COLUMNS = ("control", "tokens", "chi²/df", "p at most")


@dataclass(frozen=True, slots=True)
class SamplingTest:
    """One test, under the names of its JSON."""

    name: str  # verifier or control
    impl: str  # reference or fast; control for a version that is wrong on purpose; module for a rule of a user
    sampling: str  # sampling parameters
    tokens: int  # tokens that were tested
    round_starts: int  # tokens that begin a round, the first of each request excepted
    accept_length: float  # mean tokens per round
    ln_e_value: float  # natural logarithm of the e-value; infinite where a token has no probability
    chi_square: ChiSquare
    bound: float  # p-value below which the distribution is rejected
    detectable_distance: float  # least total variation that is detected with probability 0.99; NaN for none
    is_control: bool = False  # whether it is a control: an engine that is wrong on purpose

    @property
    def p_value(self) -> float:
        """Upper bound of the p-value, for any number of tokens."""
        return math.exp(min(0.0, -self.ln_e_value))

    @property
    def is_rejected(self) -> bool:
        """Whether the distribution is rejected."""
        return self.p_value < self.bound

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write; write_json turns an infinite e-value into null."""
        fields = asdict(self) | {"chi_square": self.chi_square._asdict()}
        return fields | {"p_value": self.p_value, "is_rejected": self.is_rejected}


@dataclass(frozen=True, slots=True)
class SamplingTests:
    """All tests of a run."""

    rows: tuple[SamplingTest, ...]
    seed: int  # random seed of all requests
    false_alarm: float  # bound on the probability that a correct engine fails any of them
    seconds: float  # wall-clock time of the run, in seconds
    date: str  # date and time of the run in UTC, to the second
    versions: dict[str, str]

    @property
    def failures(self) -> tuple[str, ...]:
        """List rejected distributions and controls that are not rejected, in words."""
        return tuple(
            f"{row.name} ({row.impl}), {row.sampling}" for row in self.rows if row.is_rejected != row.is_control
        )

    @property
    def is_ok(self) -> bool:
        """Whether nothing failed, and some test would have rejected an error."""
        return not self.failures and self.has_power

    @property
    def has_power(self) -> bool:
        return not all(math.isnan(row.detectable_distance) for row in self.rows if not row.is_control)

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in ("date", "versions", "seconds", "seed", "false_alarm")}
        return fields | {"is_ok": self.is_ok, "failures": self.failures, "tests": [r.to_json() for r in self.rows]}

    def show(self, console: Console) -> None:
        """Print a table of the tests, one of the controls, and the verdict in words."""
        paragraph(console, INTRODUCTION)
        heading(console, "Tests")
        print_table(console, COLUMNS, [_cells(row) for row in self.rows if not row.is_control])
        if controls := [row for row in self.rows if row.is_control]:
            heading(console, "Wrong on purpose")
            print_table(console, CONTROL_COLUMNS, [_control(row) for row in controls])
        console.print()
        paragraph(console, _verdict(self))


def _cells(row: SamplingTest) -> tuple[str, ...]:
    detects = "-" if math.isnan(row.detectable_distance) else f"{row.detectable_distance:.3f}"
    counts = f"{row.tokens:,}", f"{row.round_starts:,}", f"{row.accept_length:.2f}"
    return row.name, row.impl, row.sampling, *counts, _ratio(row), f"{row.p_value:.1g}", detects


def _control(row: SamplingTest) -> tuple[str, ...]:
    return row.name, f"{row.tokens:,}", _ratio(row), f"{row.p_value:.0e}" if row.p_value else "0"


def _ratio(row: SamplingTest) -> str:
    """Print chi-square over its degrees of freedom; `-` where there are too few tokens."""
    chi_square = row.chi_square
    return f"{chi_square.statistic / chi_square.degrees_of_freedom:.2f}" if chi_square.degrees_of_freedom else "-"


def _verdict(results: SamplingTests) -> str:
    tests = [row for row in results.rows if not row.is_control]
    count = f"{len(tests)} tests of {sum(row.tokens for row in tests):,} tokens"
    bounds = f"A distribution is rejected below p = {tests[0].bound:.1e}; a correct engine fails any of the tests"
    summary = f"{count} in {results.seconds:.0f} s, seed {results.seed}. {bounds} with a probability of at most "
    summary += f"{results.false_alarm:.0e}. "
    if results.failures:
        return f"{summary}Not as expected: {'; '.join(results.failures)}."
    wrong = len(results.rows) - len(tests)
    return f"{summary}None is rejected." + (f" All {wrong} controls are." if wrong else "")
