"""One operation by several implementations: each is checked first, and timed only if it passes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specsim.bench.clock import launched
from specsim.bench.roofline import Ceilings, Floor
from specsim.bench.row import OURS, Asked, Check, Row, Timing

SAMPLES = 20


@dataclass(frozen=True, slots=True)
class Contender:
    """An implementation of an operation."""

    name: str
    run: Callable[[int], Any]  # launches the operation on input number i, without waiting for it
    judge: Callable[[Any], Check]  # checks the result of run(0)
    time: Callable[[], Timing] | None = None  # None: launched from a graph over all inputs in turn


Asks = Callable[[Mapping[str, float], Floor, Ceilings], Sequence[Asked]]


def at_floor(what: str, limit: float) -> Asks:
    """Set a target of our time over the roofline bound."""
    return lambda times, floor, ceilings: [Asked(what, times[OURS] / floor.us(ceilings), limit)]


def contest(
    name: str,
    setting: Mapping[str, Any],
    contenders: Sequence[Contender],
    floor: Floor,
    ceilings: Ceilings,
    copies: int = 1,
    asks: Asks | None = None,
    notes: Sequence[str] = (),
) -> Row:
    """Check all, and time those that pass. A baseline that cannot run here becomes a note; ours has to run."""
    checks: dict[str, Check] = {}
    timings: dict[str, Timing] = {}
    notes = list(notes)
    for each in contenders:
        try:
            checks[each.name] = each.judge(each.run(0))
            if checks[each.name].passed:
                timings[each.name] = each.time() if each.time else launched(each.run, copies, SAMPLES)
        except Exception as error:  # of whatever kind a rival's compiler raises
            if each.name == OURS:
                raise
            checks.pop(each.name, None)
            notes.append(f"{each.name} did not run here: {type(error).__name__}: {' '.join(str(error).split())[:240]}")
    medians = {who: timing.median_us for who, timing in timings.items()}
    asked = tuple(asks(medians, floor, ceilings)) if asks and OURS in medians else ()
    return Row(name, setting, checks, timings, floor, floor.us(ceilings), asked, tuple(notes))
