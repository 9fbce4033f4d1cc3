"""One operation, several who carry it out: each is judged first, and timed only if it gives what it should."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specsim.bench.clock import launched
from specsim.bench.roofline import Ceilings, Floor
from specsim.bench.row import OURS, Asked, Check, Row, Timing


@dataclass(frozen=True, slots=True)
class Contender:
    """Who carries out an operation.

    run: the operation on input number i, launched and not waited for. judge: of what run(0) left. time: None: launched
    from a graph over all inputs in turn.
    """

    name: str
    run: Callable[[int], Any]
    judge: Callable[[Any], Check]
    time: Callable[[], Timing] | None = None


Asks = Callable[[Mapping[str, float], Floor, Ceilings], Sequence[Asked]]


def nothing_asked(times: Mapping[str, float], floor: Floor, ceilings: Ceilings) -> Sequence[Asked]:
    """No figure is asked of this operation."""
    return ()


def at_floor(what: str, limit: float) -> Asks:
    """Our time over the floor at most `limit`."""
    return lambda times, floor, ceilings: [Asked(what, times[OURS] / floor.us(ceilings), limit)]


def contest(
    name: str,
    setting: Mapping[str, Any],
    contenders: Sequence[Contender],
    floor: Floor,
    ceilings: Ceilings,
    copies: int = 1,
    samples: int = 20,
    asks: Asks = nothing_asked,
    notes: Sequence[str] = (),
) -> Row:
    """Judge everyone, time those who pass. A rival that cannot run here is told of in the notes; we have to."""
    checks, timings, notes = {}, {}, list(notes)
    for each in contenders:
        try:
            checks[each.name] = each.judge(each.run(0))
            if checks[each.name].passed:
                timings[each.name] = each.time() if each.time else launched(each.run, copies, samples)
        except Exception as error:  # of whatever kind a rival's compiler raises
            if each.name == OURS:
                raise
            checks.pop(each.name, None)
            notes.append(f"{each.name} did not run here: {type(error).__name__}: {' '.join(str(error).split())[:240]}")
    medians = {who: timing.median_us for who, timing in timings.items()}
    asked = tuple(asks(medians, floor, ceilings)) if OURS in medians else ()
    return Row(name, setting, checks, timings, floor, floor.us(ceilings), asked, tuple(notes))
