"""Report on a module's functions: a row for each operation, and each failed case."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import indent
from typing import Any, Self

from rich.console import Console

from specsim.core.display import heading, print_table
from specsim.core.user_module import CALL_SECONDS, load_module
from specsim.correctness.conformance.dump import check_folder, script, write_script
from specsim.correctness.conformance.runner import CaseOutcome, CaseProcess, chosen_cases, chosen_operations, name_of


@dataclass(frozen=True, slots=True)
class CaseSettings:
    """Choice of cases, time limit of a call, and folder of failed cases."""

    case: str | None = None  # name of the only case, OPERATION: NAME or NAME
    seconds: float = CALL_SECONDS  # limit of a call
    dump: Path | None = None  # folder for a script of each failed case


ALL_CASES = CaseSettings()


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """Outcomes of a module's functions."""

    module: str  # module whose functions were checked
    device: str  # device of the implementation: cpu or cuda
    functions: dict[str, str]  # name of the called function by operation
    outcomes: tuple[CaseOutcome, ...]  # of every case, in their order

    @classmethod
    def of(
        cls,
        module: str,
        operations: Sequence[str] | None,
        device: str,
        progress: Callable[[int, int], None] | None = None,
        settings: CaseSettings = ALL_CASES,
    ) -> Self:
        """Run the cases of these operations, or of all that the module has.

        progress: called with the number of finished cases and of all. InputError for a module, an operation or a case
        that does not exist.
        """
        loaded = load_module(module)
        chosen = chosen_operations(loaded, operations)
        cases = chosen_cases(chosen, settings.case)
        if settings.dump is not None:
            check_folder(settings.dump, cases)
        outcomes = []
        with CaseProcess(module, device, settings.seconds) as process:
            for done, chosen_case in enumerate(cases):
                if progress is not None:
                    progress(done, len(cases))
                outcomes.append(process.run(chosen_case))
                if settings.dump is not None and not outcomes[-1].passed:
                    write_script(
                        settings.dump, chosen_case, script(module, loaded, chosen_case, device, settings.seconds)
                    )
        functions = {operation.name: name_of(loaded, operation, device) or "" for operation in chosen}
        return cls(module, device, functions, tuple(outcomes))

    @property
    def failures(self) -> tuple[CaseOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if not outcome.passed)

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return asdict(self) | {"outcomes": [asdict(outcome) | {"passed": outcome.passed} for outcome in self.outcomes]}

    def show(self, console: Console) -> None:
        """Print the table, then of each failure the operation, the case, the first wrong element and its neighbours."""
        columns = ("operation", "function", "cases", "equal", "refused", "wrong")
        print_table(console, columns, [self._row(name) for name in self.functions])
        if self.failures:
            heading(console, "Wrong")
            for outcome in self.failures:
                console.print(f"{outcome.operation}: {outcome.case}", highlight=False)
                lines = (f"{outcome.status}: {outcome.detail}", outcome.excerpt, *outcome.patterns)
                console.print(indent("\n".join(filter(None, lines)), "    "), highlight=False)

    def _row(self, name: str) -> tuple[str, ...]:
        outcomes = [outcome for outcome in self.outcomes if outcome.operation == name]
        counts = [sum(outcome.status == status for outcome in outcomes) for status in ("equal", "refused")]
        wrong = sum(not outcome.passed for outcome in outcomes)
        return name, self.functions[name], *map(str, (len(outcomes), *counts, wrong))
