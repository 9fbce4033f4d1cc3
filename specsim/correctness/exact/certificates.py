"""Certificates of every verifier in every column, and of what is wrong on purpose."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from specsim.core.errors import InputError
from specsim.core.provenance import now, versions
from specsim.correctness.exact import implementations as columns
from specsim.correctness.exact.cases import CASES, INTERPRETED, LAUNCHED, cases_of
from specsim.correctness.exact.controls import CONTROLS
from specsim.correctness.exact.distribution import ExactLaw, NotConstant, exact_law
from specsim.correctness.exact.model import Case
from specsim.correctness.exact.optimum import optimum
from specsim.correctness.exact.verifier import VERIFIERS, Verifier
from specsim.serving.generation import kernel_device

if TYPE_CHECKING:
    from rich.console import Console

NAMES = tuple(dict.fromkeys(verifier.family for verifier in VERIFIERS))
IMPLS = ("reference", "fast", "both")
Task = tuple[Case, tuple[str, str, str], Callable[[], ExactLaw]]


@dataclass(frozen=True, slots=True)
class Certificate:
    """What one verifier does on one case, exactly.

    total_variation: of the law of S + 1 tokens from the target's. accepted: expected accepted drafts. optimum: the most
    that a lossless rule could accept. impossible: the probability of texts that the target never writes. grid: at most
    what uniforms of 24 bits add to the total variation, 0 where none are read. regions: outcomes that were taken.
    """

    verifier: str
    promise: str
    impl: str
    case: str
    total_variation: Fraction
    accepted: Fraction
    optimum: Fraction
    impossible: Fraction
    grid: Fraction
    regions: int

    @property
    def is_as_promised(self) -> bool:
        """Whether a lossless verifier has exactly the target's law, and a wrong one is seen to have another."""
        expected = {"lossless": self.total_variation == 0, "wrong": self.total_variation > 0}
        return expected.get(self.promise, True)

    @property
    def gap(self) -> Fraction | None:
        """What a lossless verifier accepts less than it could."""
        return self.optimum - self.accepted if self.promise == "lossless" else None

    def to_json(self) -> dict[str, Any]:
        """Fractions as texts and, under another name, as numbers."""
        plain = ("verifier", "promise", "impl", "case", "regions", "is_as_promised")
        names = ("total_variation", "accepted", "optimum", "gap", "impossible", "grid")
        exact = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {
            **{name: getattr(self, name) for name in plain},
            **{name: str(value) for name, value in exact.items()},
            **{f"{name}_float": float(value) for name, value in exact.items()},
        }


@dataclass(frozen=True, slots=True)
class Certificates:
    """All of a run, controls among them.

    inconsistent: laws that could not be taken, and why. left_out: cases that the fast column was not certified on.
    """

    rows: tuple[Certificate, ...]
    inconsistent: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float
    date: str
    versions: dict[str, str]

    @property
    def failures(self) -> tuple[str, ...]:
        """What is not as promised, in words."""
        broken = (row for row in self.rows if not row.is_as_promised)
        return (*(f"{row.verifier} ({row.impl}) on {row.case}" for row in broken), *self.inconsistent)

    def to_json(self) -> dict[str, Any]:
        made = {"date": self.date, "versions": self.versions, "seconds": self.seconds}
        rows = [row.to_json() for row in self.rows]
        return made | {
            "is_ok": not self.failures,
            "failures": self.failures,
            "left_out": self.left_out,
            "certificates": rows,
        }

    def show(self, console: "Console") -> None:
        from specsim.correctness.exact.report import show

        show(self, console)


def certify(
    verifier: str | None = None, *, impl: str = "reference", device: str | None = None, progress: bool = False
) -> Certificates:
    """Certify a verifier, or all of them and the controls. device: of the fast column."""
    if verifier is not None and verifier not in NAMES:
        raise InputError("verifier", verifier, " or ".join(NAMES))
    if impl not in IMPLS:
        raise InputError("impl", impl, " or ".join(IMPLS))
    if impl == "reference" and device not in (None, "cpu"):
        raise InputError("device", device, "cpu with impl 'reference'")
    where = "cpu" if impl == "reference" else kernel_device(device)
    date, start = now(), time.perf_counter()
    chosen = [each for each in VERIFIERS if verifier in (None, each.family)]
    tasks = [*_tasks(chosen, impl, where), *(_controls() if verifier is None else ())]
    rows, inconsistent, most = [], [], cache(optimum)
    for case, names, law in tqdm(tasks, unit="law", disable=None if progress else True):
        try:
            rows.append(_certificate(case, names, law(), most(case)))
        except NotConstant as error:
            inconsistent.append(f"{names[0]} ({names[2]}) on {case.name}: {error}")
    left_out = tuple(sorted({case.name for each in chosen for case in _left_out(each, impl, where)}))
    seconds = time.perf_counter() - start
    return Certificates(tuple(rows), tuple(inconsistent), left_out, seconds, date, versions(where))


def _tasks(chosen: list[Verifier], impl: str, device: str) -> Iterator[Task]:
    for each in chosen:
        for name in ("reference", "fast") if impl == "both" else (impl,):
            column = columns.fast(each, device) if name == "fast" else columns.reference(each)
            for case in cases_of(_table(name, device), each.drafts, each.name == "greedy"):
                yield case, (each.name, each.promise, name), partial(exact_law, each, case, column)


def _table(impl: str, device: str) -> dict[str, tuple[Case, ...]]:
    return CASES if impl == "reference" else LAUNCHED if device == "cuda" else INTERPRETED


def _left_out(verifier: Verifier, impl: str, device: str) -> set[Case]:
    if impl == "reference":
        return set()
    return set(CASES[verifier.drafts]) - set(_table("fast", device)[verifier.drafts])


def _controls() -> Iterator[Task]:
    for each in CONTROLS:
        yield each.case, (each.name, "wrong", "control"), each.law


def _certificate(case: Case, names: tuple[str, str, str], law: ExactLaw, most: Fraction) -> Certificate:
    figures = law.total_variation(case), law.accepted, most, law.impossible(case), law.grid, law.regions
    return Certificate(*names, case.name, *figures)
