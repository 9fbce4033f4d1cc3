"""Schedule of settings by batch size, from the tokens a second of a steady batch in closed form."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specsim.core.config import SpecConfig
from specsim.simulator.acceptance import Option, mean_rounds
from specsim.simulator.candidates import EQUAL, cheapness
from specsim.simulator.cell import Cell
from specsim.simulator.scenario import Scenario
from specsim.simulator.server import round_pages


@dataclass(frozen=True, slots=True)
class SteadyBatch:
    """A scenario's server that always holds equally many requests of mean lengths.

    A new one replaces each that ends. In the simulation lengths vary, requests start and end together by chance, and a
    run begins and ends with an empty server.
    """

    scenario: Scenario
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of each prompt, in the prefix cache

    @classmethod
    def of(cls, scenario: Scenario) -> "SteadyBatch":
        """Make the steady batch of a scenario's mean lengths."""
        work = scenario.workload
        means = [round(lengths.mean()) for lengths in (work.prompt_tokens, work.output_tokens, work.cached_columns)]
        return cls(scenario, *means)

    def most_requests(self, option: Option) -> int:
        """Count the requests that have a place and KV slots until they end."""
        config = option.config
        pages = int(round_pages(np.array([self.prompt_tokens + self.output_tokens]), (config,))[0])
        return max(1, min(self.scenario.max_running, self.scenario.slots(option) // (pages * config.page_size)))

    def tokens_per_s(self, option: Option, requests: int) -> float:
        """Compute the output tokens a second with this setting; requests beyond the places wait.

        The front end takes in one request after the other.
        """
        requests = min(requests, self.most_requests(option))
        intake = self.scenario.arriving.intake
        return requests * self.output_tokens / max(self._seconds(option, requests), requests * intake)

    def _seconds(self, option: Option, requests: int) -> float:
        """Compute the seconds in which each place serves one request.

        A step prefills on average one prompt per request that ends in a round: between two whole numbers of them.
        """
        rounds = mean_rounds(option, self.output_tokens - 1) + (self.scenario.schedule_of(option) == "overlap")
        together = max(1.0, requests / (rounds + 1))
        fewer = int(together)
        more = together - fewer
        seconds = (1 - more) * self._seconds_of(option, requests, rounds, fewer)
        return seconds + (more and more * self._seconds_of(option, requests, rounds, fewer + 1))

    def _seconds_of(self, option: Option, requests: int, rounds: float, together: int) -> float:
        """Compute the same if every step with prompts has this many."""
        scenario = self.scenario
        cost = scenario.cost(option)
        context = self.prompt_tokens + self.output_tokens // 2
        chunks = self._chunks(together)
        prefills = requests / together
        round_seconds = cost.round(np.full(requests, context), option.config)
        alone = prefills * sum(cost.prefill(new, behind) for new, behind in chunks)
        if scenario.prefill != "mixed":
            return rounds * round_seconds + alone
        # A step with chunks is a round of the others: a request takes part in all steps except its own prompt's.
        others = np.full(requests - together, context)
        mixed = prefills * sum(cost.mixed(new, behind, others, option.config) for new, behind in chunks)
        with_rounds = (prefills - 1) * len(chunks)
        if rounds >= with_rounds:
            return (rounds - with_rounds) * round_seconds + mixed
        return alone + rounds / with_rounds * (mixed - alone)

    def _chunks(self, together: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Split equal prompts, prefilled together, into steps: new tokens, and those before them."""
        prompt = self.prompt_tokens
        most = max(1, (self.scenario.chunk_tokens or together * prompt) // together)
        starts = np.arange(min(self.cached_tokens, prompt - 1), prompt, most)
        sizes = np.minimum(starts + most, prompt) - starts
        return [(np.full(together, size), np.full(together, start)) for size, start in zip(sizes, starts, strict=True)]


SWITCH = 0.02  # relative loss that a range more has to save; mean prompts of a step are whole, which alone costs 1 %
STEP = 8  # engines capture graphs of 1, 2, 4, ... and of multiples of 8 requests, and pad other batches to the next


@dataclass(frozen=True, slots=True)
class Range:
    """The best setting from `low` to `high` running requests."""

    low: int  # least running requests
    high: int  # most running requests
    config: SpecConfig
    speedup: float  # speed-up over plain decoding, at `high` requests or as many as have KV slots


class SteadySpeeds:
    """Output tokens a second of steady batches under each of several settings and plain decoding, computed once."""

    def __init__(self, cell: Cell, options: Sequence[Option]) -> None:
        self.plain = Option.plain(cell.page_size)
        scenarios = cell.scenarios([self.plain, *options])
        self.batches = {scenario.option: SteadyBatch.of(scenario) for scenario in scenarios}
        self.most_requests = self.batches[self.plain].most_requests(self.plain)
        self._speeds: dict[tuple[Option, int], float] = {}

    def tokens_per_s(self, option: Option, requests: int) -> float:
        """Compute the output tokens a second with this setting."""
        if (option, requests) not in self._speeds:
            self._speeds[option, requests] = self.batches[option].tokens_per_s(option, requests)
        return self._speeds[option, requests]


def schedule(cell: Cell, options: Sequence[Option], speeds: SteadySpeeds | None = None) -> tuple[Range, ...]:
    """Choose a setting for every batch size from 1 to max_running, by output tokens/s of a steady batch.

    A size has the setting of the next size of _sizes. Of all schedules it is the one of least lost time, where the
    losses of these sizes are added, those up to EQUAL as 0, and a change of the setting costs SWITCH; of equal ones the
    one of fewer drafts.
    Without options it is empty.
    """
    if not options:
        return ()
    speeds = speeds or SteadySpeeds(cell, options)
    sizes = _sizes(min(cell.max_running, speeds.most_requests))
    options = sorted(options, key=lambda option: cheapness(option.config))
    values = np.array([[speeds.tokens_per_s(option, size) for option in options] for size in sizes])
    losses = np.log(values.max(axis=1, keepdims=True) / values)
    losses[losses <= np.log1p(EQUAL)] = 0.0
    ranges: list[Range] = []
    for before, size, choice, speed in zip((0, *sizes), sizes, _least_loss(losses), values, strict=False):
        speedup = float(speed[choice]) / speeds.tokens_per_s(speeds.plain, size)
        high = size if size < sizes[-1] else cell.max_running
        ranges.append(Range(before + 1, high, options[choice].config, speedup))
    return _joined(ranges)


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
    for entry in ranges:
        if joined and joined[-1].config == entry.config:
            joined[-1] = Range(joined[-1].low, entry.high, entry.config, entry.speedup)
        else:
            joined.append(entry)
    return tuple(joined)
