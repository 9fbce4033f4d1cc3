"""Requests of files: lengths, times and conversations, whatever format they came in."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

import numpy as np

from specsim.core.errors import InputError, require
from specsim.simulator.bounds import count, positive
from specsim.simulator.uniforms import UniformStream, keys, named_uniforms
from specsim.simulator.workload import Arrivals, SimulatedWorkload

ACTIVE = 64  # conversations under way at once, where a file gives no times; at least twice the clients
_WINDOW = 3  # index of the uniform that places a window; lengths and times have 0 to 2
_TIMES = 2


class Turn(NamedTuple):
    """A request in a file."""

    prompt_tokens: int  # earlier turns included
    output_tokens: int
    known_tokens: int = 0  # first tokens of the prompt that are the turn before it: its prompt and output


@dataclass(frozen=True, slots=True, eq=False)
class RequestFile:
    """Requests of one file."""

    format: str  # a name to print
    conversations: tuple[tuple[Turn, ...], ...]  # a request without earlier turns is one of its own
    arrivals_s: np.ndarray | None = None  # f64 [R], ascending seconds from 0, of conversations of one turn; None: none
    skipped: int = 0  # requests without prompt or output, left out

    def __len__(self) -> int:
        return sum(map(len, self.conversations))


@dataclass(frozen=True, slots=True)
class Replay:
    """Choice of requests of a file, and of their times."""

    requests: int  # most requests; a window of neighbours in the file, placed at random
    rate: float | None = None  # requests/s on average; None: the times of the file, or clients
    concurrency: int | None = None  # clients, where the file has no times and no rate is given
    arrivals: Arrivals = Arrivals()  # noqa: RUF009 - frozen; of a file without times
    page_size: int | None = None  # of the prefix cache; None: nothing is cached
    slots: int | None = None  # of the KV cache, the prefix cache included; None: no limit
    seed: int = 0


def replay(file: RequestFile, choice: Replay) -> SimulatedWorkload:
    """Make a workload of a file's requests."""
    order = in_order(file, max(ACTIVE, 2 * (choice.concurrency or 0)))
    first, last = _window(len(order.turns), choice)
    chosen = order.turns[first:last]
    prompts = np.array([turn.prompt_tokens for turn in chosen])
    outputs = np.array([turn.output_tokens for turn in chosen])
    page = choice.page_size
    cached = None if page is None else _cached(order, first, last, page, choice.slots)
    times = _times(file, choice, first, last)
    if times is None and choice.concurrency is None:
        raise InputError("concurrency", None, "clients or a rate for a file without times of arrival")
    clients = choice.concurrency if times is None else None
    return SimulatedWorkload(prompts, outputs, times, clients, cached_tokens=cached)


class Order(NamedTuple):
    """Requests in the order of their arrival."""

    turns: tuple[Turn, ...]
    before: np.ndarray  # int64 [R], place of the turn before each in its conversation, -1 for a first turn


@lru_cache(maxsize=8)
def in_order(file: RequestFile, active: int = ACTIVE) -> Order:
    """List the requests of a file, taking a turn of each of `active` conversations in rotation.

    When a conversation ends the next one of the file takes its place. So a turn comes active - 1 requests after the one
    before it, which has ended by then if no more requests are in flight. Requests without other turns stay in order.
    """
    waiting = iter(file.conversations)
    under_way = [(iter(conversation), -1) for conversation in islice(waiting, active)]
    turns: list[Turn] = []
    before: list[int] = []
    while under_way:
        staying = []
        for conversation, last in under_way:
            turn = next(conversation, None)
            if turn is None and (following := next(waiting, None)) is not None:
                conversation, last = iter(following), -1
                turn = next(conversation)
            if turn is not None:
                staying.append((conversation, len(turns)))
                turns.append(turn)
                before.append(last)
        under_way = staying
    return Order(tuple(turns), np.array(before))


def _cached(order: Order, first: int, last: int, page_size: int, slots: int | None) -> np.ndarray:
    """Count the cached columns of the requests from first to last - 1.

    They are the whole pages of the turn before, without its last token's column, as in serving.prefix. Of these remain
    as many as the requests since then have left of the slots: the cache evicts what was used longest ago.
    """
    sizes = np.array([turn.prompt_tokens + turn.output_tokens for turn in order.turns])
    total = np.concatenate(([0], np.cumsum(sizes)))
    since = total[first:last] - total[order.before[first:last] + 1]
    chosen = order.turns[first:last]
    cached = np.array([min(turn.known_tokens, turn.prompt_tokens) - 1 for turn in chosen])
    if slots is not None:
        cached = np.minimum(cached, slots - since)
    return np.maximum(cached, 0) // page_size * page_size


def _window(size: int, choice: Replay) -> tuple[int, int]:
    most = min(count("requests", choice.requests), size)
    uniform = named_uniforms(keys(choice.seed, UniformStream.LENGTH, np.arange(1)), _WINDOW)[0]
    first = int(uniform * (size - most + 1))
    return first, first + most


def _times(file: RequestFile, choice: Replay, first: int, last: int) -> np.ndarray | None:
    """Find times from 0: those of the file, scaled to a rate, or drawn; None: clients."""
    if file.arrivals_s is not None:
        times = file.arrivals_s[first:last] - file.arrivals_s[first]
        if choice.rate is None:
            return times
        require(len(times) == 1 or times[-1] > 0, "rate", choice.rate, "none for requests that all come at once")
        return times * ((len(times) - 1) / times[-1] / positive("rate", choice.rate)) if len(times) > 1 else times
    if choice.rate is None:
        return None
    uniforms = named_uniforms(keys(choice.seed, UniformStream.LENGTH, np.arange(last - first)), _TIMES)
    return choice.arrivals.swung(choice.arrivals.at_unit_rate(uniforms) / positive("rate", choice.rate))
