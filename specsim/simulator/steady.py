"""Steady batch: tokens a second of a server whose places are always taken, prompts included, in closed form."""

from dataclasses import dataclass

import numpy as np

from specsim.simulator.columns import round_pages
from specsim.simulator.mean_rounds import mean_rounds
from specsim.simulator.option import Option
from specsim.simulator.scenario import Scenario


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
        means = [round(each.mean()) for each in (work.prompt_tokens, work.output_tokens, work.cached_columns)]
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
        rounds = mean_rounds(option, self.output_tokens - 1) + (self.scenario.schedule == "overlap")
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
