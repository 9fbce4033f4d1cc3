"""Schedule of settings by batch size: the best setting of every number of running requests, in ranges."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specsim.core.config import SpecConfig
from specsim.simulator.cell import Cell
from specsim.simulator.option import Option
from specsim.simulator.replicates import EQUAL, cheapness
from specsim.simulator.steady import SteadyBatch

SWITCH = 0.02  # relative loss that a range more has to save; mean prompts of a step are whole, which alone costs 1 %
STEP = 8  # engines capture graphs of 1, 2, 4, ... and of multiples of 8 requests, and pad other batches to the next


@dataclass(frozen=True, slots=True)
class Range:
    """The best setting from `low` to `high` running requests."""

    low: int
    high: int
    config: SpecConfig
    speedup: float  # over plain decoding, at `high` requests or as many as have KV slots


def schedule(cell: Cell, options: Sequence[Option]) -> tuple[Range, ...]:
    """Choose a setting for every batch size from 1 to max_running, by output tokens/s of a steady batch.

    A size has the setting of the next size of _sizes. Of all schedules it is the one of least lost time, where the
    losses of these sizes are added, those up to EQUAL as 0, and a change of the setting costs SWITCH; of equal ones the
    one of fewer drafts.
    Without options it is empty.
    """
    if not options:
        return ()
    plain = Option.plain(cell.page_size)
    batches = {option: SteadyBatch.of(cell.serving(option)) for option in (plain, *options)}
    sizes = _sizes(min(cell.max_running, batches[plain].most_requests(plain)))
    options = sorted(options, key=lambda option: cheapness(option.config))
    speeds = np.array([[batches[option].tokens_per_s(option, size) for option in options] for size in sizes])
    losses = np.log(speeds.max(axis=1, keepdims=True) / speeds)
    losses[losses <= np.log1p(EQUAL)] = 0.0
    found: list[Range] = []
    for before, size, choice, speed in zip((0, *sizes), sizes, _least_loss(losses), speeds, strict=False):
        speedup = float(speed[choice]) / batches[plain].tokens_per_s(plain, size)
        high = size if size < sizes[-1] else cell.max_running
        found.append(Range(before + 1, high, options[choice].config, speedup))
    return _joined(found)


def _least_loss(losses: np.ndarray) -> list[int]:
    """Choose an option for every size, int [N], from losses f64 [N, M].

    Their sum, with SWITCH for each change, is the least; of equal ones the first is chosen.
    """
    total = losses[0]
    origins = []
    for row in losses[1:]:
        stays = total <= total.min() + SWITCH
        origins.append(np.where(stays, np.arange(len(total)), total.argmin()))
        total = np.where(stays, total, total.min() + SWITCH) + row
    choices = [int(total.argmin())]
    for origin in reversed(origins):
        choices.append(int(origin[choices[-1]]))
    return choices[::-1]


def _sizes(most: int) -> list[int]:
    return sorted({size for size in (1, 2, 4, *range(STEP, most, STEP)) if size < most} | {most})


def _joined(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """Join neighbours of one setting."""
    joined: list[Range] = []
    for each in ranges:
        if joined and joined[-1].config == each.config:
            joined[-1] = Range(joined[-1].low, each.high, each.config, each.speedup)
        else:
            joined.append(each)
    return tuple(joined)
