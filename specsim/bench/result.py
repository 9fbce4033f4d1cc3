"""Result of a suite: its rows, its environment, and whether it is complete."""

from dataclasses import asdict, dataclass
from typing import Any

from specsim.bench.roofline import Peaks
from specsim.bench.row import Row
from specsim.bench.suites import SUITES, Options
from specsim.core.json_schema import schema_name


@dataclass(frozen=True, slots=True)
class Result:
    """Result of a suite of benchmarks.

    unfinished: number of rows, the last ones, whose group is not complete.
    """

    options: Options
    command: str  # command line that gives the same result
    date: str  # date and time of the run in UTC, to the second
    versions: dict[str, str]
    peaks: Peaks | None  # None for a suite of the CPU
    rows: tuple[Row, ...] = ()
    seconds: float = 0.0  # wall-clock time of the run, in seconds
    finished: tuple[str, ...] = ()  # groups with all of their rows
    unfinished: int = 0  # rows at the end that are of no complete group

    @property
    def is_complete(self) -> bool:
        """Whether all rows of the suite are there."""
        return not self.options.quick and set(self.finished) == set(SUITES[self.options.suite].groups)

    @property
    def passed(self) -> bool:
        """Whether every equality check of the run passed."""
        return all(row.passed for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Make a value that json can write."""
        return {
            "schema": schema_name("bench"),
            "suite": self.options.suite,
            "shape": self.options.shape,
            "command": self.command,
            "date": self.date,
            "versions": self.versions,
            "measured_peaks": self.peaks and asdict(self.peaks),
            "seconds": self.seconds,
            "finished": list(self.finished),
            "unfinished": self.unfinished,
            "is_complete": self.is_complete,
            "is_quick": self.options.quick,
            "passed": self.passed,
            "rows": [row.to_json() for row in self.rows],
        }
