"""One operation by several implementations: each is checked first, and timed only if it passes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specsim.bench.clock import launched
from specsim.bench.roofline import Peaks, RooflineBound
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, Timing

SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Contender:
    """An implementation of an operation, ours or a baseline."""

    name: str
    run: Callable[[int], Any]  # launches the operation on input number i, without waiting for it
    check: Callable[[Any], Check]  # checks the result of run(0)
    time: Callable[[], Timing] | None = None  # None: in a graph over all inputs in turn


Targets = Callable[[Mapping[str, float], RooflineBound, Peaks], Sequence[PerformanceTarget]]


def roofline_target(limit: float, note: str = "") -> Targets:
    """Set a target for our time over the roofline bound."""
    name = f"time / roofline bound{note}"
    return lambda times, bound, peaks: [PerformanceTarget(name, times[OURS] / bound.us(peaks), limit)]


def contest(
    name: str,
    setting: Mapping[str, Any],
    contenders: Sequence[Contender],
    bound: RooflineBound,
    peaks: Peaks,
    copies: int = 1,
    set_targets: Targets | None = None,
    notes: Sequence[str] = (),
) -> BenchRow:
    """Check all contenders, and time those that pass.

    A baseline that cannot run here becomes a note; ours has to run.
    """
    checks: dict[str, Check] = {}
    timings: dict[str, Timing] = {}
    notes = list(notes)
    for contender in contenders:
        try:
            checks[contender.name] = contender.check(contender.run(0))
            if checks[contender.name].passed:
                timings[contender.name] = (
                    contender.time() if contender.time else launched(contender.run, copies, SAMPLES)
                )
        except Exception as error:  # whatever a baseline's compiler raises
            if contender.name == OURS:
                raise
            checks.pop(contender.name, None)
            notes.append(
                f"{contender.name} did not run here: {type(error).__name__}: {' '.join(str(error).split())[:240]}"
            )
    medians = {who: timing.median_us for who, timing in timings.items()}
    targets = tuple(set_targets(medians, bound, peaks)) if set_targets and OURS in medians else ()
    return BenchRow(name, setting, checks, timings, bound, bound.us(peaks), targets, tuple(notes))
