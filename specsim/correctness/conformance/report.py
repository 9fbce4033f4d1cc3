"""Report on a module's functions: a row for each operation, and each failed case."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from textwrap import indent
from typing import Any, Self

from rich.console import Console

from specsim.core.display import heading, print_table
from specsim.core.user_module import load_module
from specsim.correctness.conformance.runner import CASES, CaseOutcome, chosen_operations, name_of, run


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
    ) -> Self:
        """Run all cases of these operations, or of all that the module has.

        progress: called with the number of finished cases and of all. InputError for a module or an operation that does
        not exist.
        """
        loaded = load_module(module)
        chosen = chosen_operations(loaded, operations)
        cases = [case for operation in chosen for case in CASES if case.operation == operation.name]
        outcomes = []
        for done, case in enumerate(cases):
            if progress is not None:
                progress(done, len(cases))
            outcomes.append(run(module, case, device))
        functions = {operation.name: name_of(loaded, operation, device) or "" for operation in chosen}
        return cls(module, device, functions, tuple(outcomes))

    @property
    def failures(self) -> tuple[CaseOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if not outcome.passed)

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return asdict(self) | {"outcomes": [asdict(outcome) | {"passed": outcome.passed} for outcome in self.outcomes]}

    def show(self, console: Console) -> None:
        """Print the table, then operation, case and first wrong element of each failure."""
        columns = ("operation", "function", "cases", "equal", "refused", "wrong")
        print_table(console, columns, [self._row(name) for name in self.functions])
        if self.failures:
            heading(console, "Wrong")
            for outcome in self.failures:
                console.print(f"{outcome.operation}: {outcome.case}", highlight=False)
                console.print(indent(f"{outcome.status}: {outcome.detail}", "    "), highlight=False)

    def _row(self, name: str) -> tuple[str, ...]:
        outcomes = [outcome for outcome in self.outcomes if outcome.operation == name]
        counts = [sum(outcome.status == status for outcome in outcomes) for status in ("equal", "refused")]
        wrong = sum(not outcome.passed for outcome in outcomes)
        return name, self.functions[name], *map(str, (len(outcomes), *counts, wrong))
