"""Law tests of running engines: all verifiers, all sampling, and controls that must be rejected."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from specsim.core.errors import InputError
from specsim.core.provenance import now, versions
from specsim.correctness.statistics.controls import CONTROLS, Control
from specsim.correctness.statistics.e_value import ChiSquare, chi_square, ln_evidence
from specsim.correctness.statistics.power import noticed
from specsim.correctness.statistics.samples import Column, Load, outputs, sample
from specsim.correctness.statistics.settings import CONFIGS, PLAIN, SETTINGS
from specsim.correctness.statistics.small_vocabulary import opposed
from specsim.serving.generation import Output, kernel_device

if TYPE_CHECKING:
    from rich.console import Console

FALSE_ALARM = 1e-6
IMPLS = ("reference", "fast", "both")


@dataclass(frozen=True, slots=True)
class Row:
    """One test. tokens, borders: how many tokens were tested, and how many of them begin a round after another.

    accept_length: tokens a round. ln_evidence: see statistics.e_value. bound: the p-value below which the law is
    rejected. noticed: the least total variation that would have been noticed, with probability 0.99; NaN for none.
    """

    what: str
    impl: str
    sampling: str
    tokens: int
    borders: int
    accept_length: float
    ln_evidence: float
    chi_square: ChiSquare
    bound: float
    noticed: float
    is_control: bool = False

    @property
    def p_value(self) -> float:
        """At most this, however many or few tokens there are."""
        return math.exp(min(0.0, -self.ln_evidence))

    @property
    def is_rejected(self) -> bool:
        return self.p_value < self.bound

    def to_json(self) -> dict[str, Any]:
        """Evidence without end, of a token that has no probability, is null."""
        found = asdict(self) | {"chi_square": self.chi_square._asdict()}
        return found | {"p_value": self.p_value, "is_rejected": self.is_rejected}


@dataclass(frozen=True, slots=True)
class Laws:
    """All tests of a run; false_alarm: at most the probability that a right engine fails any of them."""

    rows: tuple[Row, ...]
    seed: int
    false_alarm: float
    seconds: float
    date: str
    versions: dict[str, str]

    @property
    def failures(self) -> tuple[str, ...]:
        """Laws that are rejected and controls that are not, in words."""
        return tuple(
            f"{row.what} ({row.impl}), {row.sampling}" for row in self.rows if row.is_rejected != row.is_control
        )

    def to_json(self) -> dict[str, Any]:
        made = {name: getattr(self, name) for name in ("date", "versions", "seconds", "seed", "false_alarm")}
        return made | {"is_ok": not self.failures, "failures": self.failures, "tests": [r.to_json() for r in self.rows]}

    def show(self, console: "Console") -> None:
        from specsim.correctness.statistics.report import show

        show(self, console)


def laws(
    verifier: str | None = None,
    *,
    impl: str = "reference",
    tokens: int = 200_000,
    device: str | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Laws:
    """Test the law of one verifier, or of all and the controls, with at least so many tokens of each column.

    They are divided among verifiers and settings. device: of the fast column. The controls are the reference's.
    """
    columns = _columns(impl, device)
    if verifier is not None and verifier not in CONFIGS:
        raise InputError("verifier", verifier, " or ".join(CONFIGS))
    if type(tokens) is not int or tokens < 1:
        raise InputError("tokens", tokens, "an integer of at least 1")
    date, start = now(), time.perf_counter()
    verifiers = [verifier] if verifier else list(CONFIGS)
    bound = FALSE_ALARM / (len(columns) * len(verifiers) * len(SETTINGS))
    share = math.ceil(tokens / len(verifiers) / len(SETTINGS))
    loads = [(name, Load(CONFIGS[name], SETTINGS, share, seed, column)) for column, name in product(columns, verifiers)]
    controls = [(each, Load(each.config, [PLAIN], each.tokens, seed)) for each in CONTROLS if verifier is None]
    total = sum(load.total for _, load in (*loads, *controls))
    with tqdm(total=total, unit="token", disable=None if progress else True) as bar:
        rows = [row for name, load in loads for row in _tested(name, load, bound, bar.update)]
        rows += [row for control, load in controls for row in _rejected(control, load, bound, bar.update)]
    made = time.perf_counter() - start, date, versions(columns[-1].device or "cpu")
    return Laws(tuple(rows), seed, FALSE_ALARM, *made)


def _columns(impl: str, device: str | None) -> list[Column]:
    if impl not in IMPLS:
        raise InputError("impl", impl, " or ".join(IMPLS))
    if impl == "reference" and device not in (None, "cpu"):
        raise InputError("device", device, "cpu with impl 'reference'")
    reference = [Column()] if impl != "fast" else []
    return reference if impl == "reference" else [*reference, Column("fast", kernel_device(device))]


def _tested(name: str, load: Load, bound: float, tell: Callable[[int], Any]) -> Iterator[Row]:
    """A row for each setting of a load."""
    narrow = opposed()
    found = outputs(narrow, load, tell)
    for setting in load.settings:
        tested, rounds = sample(narrow, setting, found[setting.name]), _rounds(found[setting.name])
        yield Row(
            what=name,
            impl=load.column.impl,
            sampling=setting.name,
            tokens=len(tested),
            borders=int(tested.is_first.sum()),
            accept_length=sum(rounds) / len(rounds),
            ln_evidence=ln_evidence(tested),
            chi_square=chi_square(tested),
            bound=bound,
            noticed=noticed(tested, bound),
        )


def _rejected(control: Control, load: Load, bound: float, tell: Callable[[int], Any]) -> Iterator[Row]:
    """The row of a control."""
    with control.planted():
        rows = list(_tested(control.name, load, bound, tell))
    return (replace(row, is_control=True) for row in rows)


def _rounds(found: Sequence[Output]) -> list[int]:
    return [count for output in found for count in output.num_accepted_tokens_per_round]
