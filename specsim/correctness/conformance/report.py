"""What a module's functions are worth: a line for each operation, and each case that is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from textwrap import indent
from typing import Any, Self

from specsim.core.display import heading, print_table
from specsim.correctness.conformance.catalogue import CASES
from specsim.correctness.conformance.runner import Outcome, chosen_operations, load_module, name_of, run


@dataclass(frozen=True, slots=True)
class Report:
    """functions: by operation the name of the function that was called. outcomes: of every case, in their order."""

    module: str
    device: str
    functions: dict[str, str]
    outcomes: tuple[Outcome, ...]

    @classmethod
    def of(
        cls,
        module: str,
        operations: Sequence[str] | None,
        device: str,
        watch: Callable[[int, int], None] = lambda done, of: None,
    ) -> Self:
        """Run all cases of these operations, or of all that the module has. watch: told how many are done, of how many.

        InputError for a module or an operation that is not there.
        """
        loaded = load_module(module)
        chosen = chosen_operations(loaded, operations)
        cases = [case for operation in chosen for case in CASES if case.operation == operation.name]
        outcomes = []
        for done, case in enumerate(cases):
            watch(done, len(cases))
            outcomes.append(run(module, case, device))
        return cls(module, device, {each.name: name_of(loaded, each, device) for each in chosen}, tuple(outcomes))

    @property
    def failures(self) -> tuple[Outcome, ...]:
        return tuple(outcome for outcome in self.outcomes if not outcome.passed)

    def to_json(self) -> dict[str, Any]:
        """All of it, as --json writes it."""
        return asdict(self) | {"outcomes": [asdict(each) | {"passed": each.passed} for each in self.outcomes]}

    def show(self, console) -> None:
        """The table, then operation, case and first wrong element of all that failed."""
        columns = ("operation", "function", "cases", "equal", "refused", "wrong")
        print_table(console, columns, [self._row(name) for name in self.functions])
        if self.failures:
            heading(console, "Wrong")
            for outcome in self.failures:
                console.print(f"{outcome.operation}: {outcome.case}", highlight=False)
                console.print(indent(f"{outcome.status}: {outcome.what}", "    "), highlight=False)

    def _row(self, name: str) -> tuple[str, ...]:
        own = [outcome for outcome in self.outcomes if outcome.operation == name]
        counts = [sum(outcome.status == status for outcome in own) for status in ("equal", "refused")]
        wrong = sum(not outcome.passed for outcome in own)
        return name, self.functions[name], *map(str, (len(own), *counts, wrong))
