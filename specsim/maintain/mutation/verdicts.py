"""Results of mutation testing: a verdict per mutant, and the score of a sample."""

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from specsim.core.json_schema import read_record
from specsim.correctness.faults.fault import path_of
from specsim.maintain.mutation.equivalents import EQUIVALENT
from specsim.maintain.mutation.mutants import Mutant

FIELDS = ("module", "function", "is_kernel", "line", "operator", "old", "new")  # of a mutant, in the JSON


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a module's tests over one mutant."""

    mutant: Mutant
    tests: str  # name of the test file
    by: str | None  # failed test, `no end`, or `exit status n`, below 0 for a signal; None for a survivor
    seconds: float

    @property
    def why_equivalent(self) -> str | None:
        """Proof that no test can see the mutant, where there is one."""
        return None if self.by else EQUIVALENT.get(self.mutant.key)


@dataclass(frozen=True, slots=True)
class KeptVerdict:
    """A verdict in the JSON of an earlier run."""

    key: str  # of the mutant
    tests: str
    by: str | None
    seconds: float

    @classmethod
    def of(cls, row: Any, name: str) -> Self:
        """Read a row of the results; InputError, which begins with the name, for anything else."""
        names = [field.name for field in fields(cls)]
        return read_record(cls, {key: row[key] for key in names if key in row} if isinstance(row, dict) else row, name)


@dataclass(frozen=True, slots=True)
class Mutation:
    """Verdicts on a seeded sample of mutants."""

    verdicts: tuple[Verdict, ...]
    seed: int
    num_candidates: int  # mutants that the sample was drawn from
    seconds: float
    is_complete: bool  # every drawn mutant has a verdict

    @property
    def survivors(self) -> tuple[Verdict, ...]:
        """Mutants that no test sees and that are not known to be the same program."""
        return tuple(each for each in self.verdicts if not each.by and not each.why_equivalent)

    def to_json(self) -> dict[str, Any]:
        """Value that json can write."""
        count = len(self.verdicts)
        killed = sum(each.by is not None for each in self.verdicts)
        equivalent = sum(each.why_equivalent is not None for each in self.verdicts)
        return {
            "seed": self.seed,
            "candidates": self.num_candidates,
            "is_complete": self.is_complete,
            "mutants": count,
            "in_kernels": sum(each.mutant.is_kernel for each in self.verdicts),
            "killed": killed,
            "equivalent": equivalent,
            "score_raw": killed / max(1, count),
            "score": killed / max(1, count - equivalent),
            "seconds": self.seconds,
            "operators": dict(Counter(each.mutant.operator for each in self.verdicts)),
            "results": [
                {name: value for name, value in asdict(each.mutant).items() if name in FIELDS}
                | {"key": each.mutant.key}
                | {name: getattr(each, name) for name in ("tests", "by", "why_equivalent", "seconds")}
                for each in self.verdicts
            ],
        }


def show(result: Mutation, say: Callable[[str], None]) -> None:
    """Print the survivors, then the score."""
    for each in result.survivors:
        mutant = each.mutant
        say(f"{path_of(mutant.module).name}, line {mutant.line}, {mutant.function}: {mutant.operator}")
        say(f"    {mutant.before}")
        say(f"    {mutant.after}")
    value = result.to_json()
    kernels = f"{value['in_kernels']} in kernels"
    say(f"\n{value['mutants']} mutants of {value['candidates']} candidates ({kernels}), seed {value['seed']}, ")
    if not result.is_complete:
        say("not all that were drawn: time was up, or tests were ended from outside, as without memory")
    equivalent = f"{value['score']:.1%} without {value['equivalent']} that are equivalent"
    say(f"{value['killed']} killed: {value['score_raw']:.1%}; {equivalent}")
