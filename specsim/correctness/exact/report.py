"""Certificates, counterexamples to acceptance rules, and their printed form."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from rich.console import Console

from specsim.core.display import heading, paragraph, print_table
from specsim.core.verifiers import LANES
from specsim.correctness.exact.cases import Distribution, Draw, ExactCase
from specsim.correctness.exact.distribution import ExactDistribution
from specsim.correctness.exact.exploration import Box, Interval

INTRODUCTION = (
    "Every drafted tree and every region of the uniforms was enumerated in fractions, and the verifier called in each. "
    "Distance: exact total variation of S + 1 tokens from the target's distribution. Accepted: expected drafts per "
    "round. Optimum: the most that any rule can accept which keeps a path of the tree, adds one token and preserves "
    "the target's distribution (a linear programme's bound, in fractions too). 24 bits: bound on the distance added by "
    "uniforms of 24 bits instead of continuous ones."
)
COLUMNS = ("verifier", "promise", "impl", "distance", "accepted", "optimum", "gap", "24 bits")
_SHORT = 4096


@dataclass(frozen=True, slots=True)
class Counterexample:
    """A drafted tree and a region of its uniforms."""

    case: str
    draw: Draw
    drafts: str  # of the rule: a value of core.verifiers.Drafts
    box: Box  # the last interval is that of the final uniform
    result: str  # what the rule does there

    def __str__(self) -> str:
        draw = self.draw
        rows = [f"p after every node {_rows(draw.target_NV)}"]
        rows += [f"q {_rows(draw.draft_NV)}"] if self._has_draft_prob else []
        tree = f"tokens {_listed(['root', *draw.tokens[1:]])}, parents {_listed(draw.parents)}, {', '.join(rows)}"
        return f"on {self.case}, with {tree}, for {self._region()} it {self.result}"

    def _region(self) -> str:
        *uniforms, final = self.box.intervals
        named = [(f"uniforms[{index}]", interval) for index, interval in enumerate(uniforms, self._first)]
        named.append(("final_uniform", final))
        limited = [f"{name} in {_interval(interval)}" for name, interval in named if interval != (0, 1)]
        return ", ".join(limited) or "all uniforms"

    @property
    def _has_draft_prob(self) -> bool:
        return self.drafts != "best"

    @property
    def _first(self) -> int:
        """Index of the first uniform of the box; lanes have one for each node below the root."""
        return int(self.drafts in LANES)

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write, fractions as texts."""
        *uniforms, final = ([str(end) for end in interval] for interval in self.box.intervals)
        uniforms = uniforms[: self._first] + uniforms
        return {
            "tokens": list(self.draw.tokens),
            "parents": list(self.draw.parents),
            "target_prob": [list(map(str, row)) for row in self.draw.target_NV],
            "draft_prob": [list(map(str, row)) for row in self.draw.draft_NV] if self._has_draft_prob else None,
            "uniforms": uniforms,
            "final_uniform": final,
            "result": self.result,
        }


def _rows(distributions: Sequence[Distribution]) -> str:
    return " ".join(f"({', '.join(map(str, prob_V))})" for prob_V in distributions)


def _listed(values: Sequence[object]) -> str:
    return f"[{', '.join(map(str, values))}]"


def _interval(interval: Interval) -> str:
    return f"({interval[0]}, {interval[1]})"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Exact figures of one verifier on one case."""

    verifier: str  # acceptance rule
    promise: str  # lossless, lossy or wrong
    impl: str  # reference, fast or control; module for a rule of a user
    case: str  # vocabulary and draft tree
    total_variation: Fraction  # of S + 1 tokens from the target's distribution
    accepted: Fraction  # expected accepted drafts
    optimum: Fraction  # expected accepted drafts of the best lossless rule
    impossible: Fraction  # probability of texts that the target never writes
    uniform_bits_bound: Fraction  # on the total variation added by uniforms of 24 bits, 0 where none are read
    regions: int  # number of joint regions in which the outcome was taken
    counterexample: Counterexample | None = None  # of a rule of a user that is not lossless

    @classmethod
    def of(
        cls,
        names: tuple[str, str, str],
        case: ExactCase,
        distribution: ExactDistribution,
        optimum: Fraction,
        counterexample: Counterexample | None = None,
    ) -> Self:
        """Compute the figures of a distribution on a case; names: verifier, promise and impl."""
        return cls(
            *(*names, case.name),
            total_variation=distribution.total_variation(case),
            accepted=distribution.accepted,
            optimum=optimum,
            impossible=distribution.impossible(case),
            uniform_bits_bound=distribution.grid,
            regions=distribution.regions,
            counterexample=counterexample,
        )

    @property
    def is_as_promised(self) -> bool:
        """Whether a lossless verifier has exactly the target's distribution, and a wrong one has not."""
        expected = {"lossless": self.total_variation == 0, "wrong": self.total_variation > 0}
        return expected.get(self.promise, True)

    @property
    def gap(self) -> Fraction | None:
        """Expected drafts that a lossless verifier accepts fewer than the optimum."""
        return self.optimum - self.accepted if self.promise == "lossless" else None

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write: fractions as texts and, under another name, as numbers."""
        plain = ("verifier", "promise", "impl", "case", "regions", "is_as_promised")
        names = ("total_variation", "accepted", "optimum", "gap", "impossible", "uniform_bits_bound")
        exact = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {
            **{name: getattr(self, name) for name in plain},
            **{name: str(value) for name, value in exact.items()},
            **{f"{name}_float": float(value) for name, value in exact.items()},
            "counterexample": self.counterexample and self.counterexample.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Certificates:
    """All certificates of a run, controls among them."""

    rows: tuple[Certificate, ...]
    inconsistent: tuple[str, ...]  # verifiers that could not be certified, and why
    not_run: tuple[str, ...]  # cases that the fast implementation was not certified on
    seconds: float  # wall-clock time of the run, in seconds
    date: str  # date and time of the run in UTC, to the second
    versions: dict[str, str]
    not_certified: tuple[str, ...] = ()  # rules of a user whose distribution is not known exactly, and why

    @property
    def failures(self) -> tuple[str, ...]:
        """List broken promises, in words."""
        broken = (row for row in self.rows if not row.is_as_promised)
        empty = () if self.rows or self.inconsistent or self.not_certified else ("no case was run",)
        broken_promises = (f"{row.verifier} ({row.impl}) on {row.case}" for row in broken)
        return (*broken_promises, *self.inconsistent, *_differing(self.rows), *empty)

    def to_json(self) -> dict[str, Any]:
        return {
            "date": self.date,
            "versions": self.versions,
            "seconds": self.seconds,
            "is_ok": not self.failures and not self.not_certified,
            "failures": self.failures,
            "not_run": self.not_run,
            "not_certified": self.not_certified,
            "certificates": [row.to_json() for row in self.rows],
        }

    def show(self, console: Console) -> None:
        """Print a table per case, the controls, and the verdict in words."""
        paragraph(console, INTRODUCTION)
        rows = [row for row in self.rows if row.promise != "wrong" and row.impl != "module"]
        for case in dict.fromkeys(row.case for row in rows):
            heading(console, case)
            print_table(console, COLUMNS, [_cells(row) for row in rows if row.case == case])
        for rule in dict.fromkeys(row.verifier for row in self.rows if row.impl == "module"):
            rule_rows = [row for row in self.rows if row.verifier == rule]
            heading(console, f"{rule}, {rule_rows[0].promise}")
            print_table(console, ("case", *COLUMNS[3:]), [(row.case, *_cells(row)[3:]) for row in rule_rows])
        if controls := [row for row in self.rows if row.promise == "wrong"]:
            heading(console, "Wrong on purpose")
            columns = ("control", "case", "distance", "never the target's")
            print_table(console, columns, [_control(row) for row in controls])
        console.print()
        if self.not_run:
            paragraph(console, f"The fast implementation was not run on: {'; '.join(self.not_run)}.")
        for row in _refuted(self.rows):
            paragraph(console, f"Counterexample to {row.verifier}: {row.counterexample}.")
            console.print()
        if self.rows or self.failures:
            paragraph(console, _verdict(self))


def _differing(rows: Sequence[Certificate]) -> Iterator[str]:
    """Name the lossy verifiers, which promise no distribution, whose implementations accept differently on a case."""
    first: dict[tuple[str, str], Certificate] = {}
    for row in rows:
        other = first.setdefault((row.verifier, row.case), row)
        if row.promise == "lossy" and (row.total_variation, row.accepted) != (other.total_variation, other.accepted):
            yield f"{row.verifier} on {row.case}: {other.impl} and {row.impl} accept differently"


def _refuted(rows: Sequence[Certificate]) -> list[Certificate]:
    """Choose the first row with a counterexample of every rule that is not as promised."""
    first: dict[str, Certificate] = {}
    for row in rows:
        if row.counterexample is not None and not row.is_as_promised:
            first.setdefault(row.verifier, row)
    return list(first.values())


def _cells(row: Certificate) -> tuple[str, ...]:
    gap = "-" if row.gap is None else f"{float(row.gap):.4f}" if row.gap else "0"
    bits = f"{float(row.uniform_bits_bound):.0e}" if row.uniform_bits_bound else "-"
    return (
        *(row.verifier, row.promise, row.impl, exact(row.total_variation)),
        *(f"{float(row.accepted):.4f}", f"{float(row.optimum):.4f}", gap, bits),
    )


def _control(row: Certificate) -> tuple[str, ...]:
    return row.verifier, row.case, exact(row.total_variation), exact(row.impossible)


def exact(value: Fraction) -> str:
    """Print a fraction, or its decimals where it is long."""
    return str(value) if value.denominator <= _SHORT else f"{float(value):.2e}"


def _verdict(certificates: Certificates) -> str:
    if certificates.failures:
        return f"Not as promised: {'; '.join(certificates.failures)}."
    promises = [row.promise for row in certificates.rows]
    if "lossless" not in promises:
        return "None of them promises to preserve the target's distribution."
    summary = f"All {promises.count('lossless')} lossless certificates hold: the distribution is exactly the target's."
    return f"{summary} The {promises.count('wrong')} controls have another." if "wrong" in promises else summary
