"""State of a simulated server: tables whose rows are records in an array, or objects in a list.

specsim.simulator.steps is compiled for the first and interpreted with the second. An int is int64, a float f64.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

MIXED, BESIDE, FIRST = range(3)  # modes of prefill, in the order of initial_state.PREFILLS
NUMBERS = {int: np.int64, float: np.float64, bool: np.bool_}


@dataclass(slots=True)
class ServerSettings:
    """Settings of a run, which never change."""

    mode: int  # of prefill: MIXED, BESIDE or FIRST
    is_lagging: bool  # the host reads a step's results while the next one runs
    victim_sign: int  # a victim has most columns with 1, fewest with -1; 0: the latest
    num_pages: int
    most_tokens: int  # prompt tokens of a step
    most_in_flight: int  # requests that the client may have sent and not got back
    intake: float  # seconds of the front end per request
    latency: float  # seconds of transport per request
    draws: int  # source of a round's accepted drafts: steps.PLAIN, DRAWN or ANSWERED
    most_steps: int  # drafts on a path, of all options
    keeps_log: bool
    tabled: int  # option whose rounds follow from `rounds` and `slopes`, -1 without one
    filters: float  # seconds added to verify
    host: float  # seconds of host work per round
    host_request: float  # and per request
    hides_host: bool  # the host works while the device does


@dataclass(slots=True)
class ServerProgress:
    """Numbers of the running server. `num_` counts the entries in use of a field of Place, Gap or Step."""

    phase: int = 0  # steps.BEGIN, PREFILLED or ROUNDED
    now: float = 0.0  # seconds, start of the next step
    planned: float = 0.0  # arrivals up to this time are known to the next plan
    start: float = 0.0  # of the current step
    idle: float = 0.0  # when the front end is free
    seconds: float = 0.0  # answer: of the prefill or the round
    option: int = -1  # answer: of the round; -1 without one
    num_running: int = 0
    num_prefilling: int = 0
    num_preempted: int = 0
    num_chunks: int = 0
    num_admitted: int = 0  # requests that ever had a place; those up to num_arrived wait for their first
    num_arrived: int = 0
    num_ended: int = 0
    num_steps: int = 0
    num_gaps: int = 0
    num_logged: int = 0
    half: int = 0  # of the pending results, to which this step adds
    pages: int = 0  # needed by the requests with a place
    most_pages: int = 0
    running: int = 0  # requests in the round of this step
    waiting: int = 0  # requests without a place


@dataclass(slots=True)
class SimulatedRequest:
    """A request by number, which is the order of arrival; the names of SimulatedRun where they agree."""

    coming: float  # seconds, from when the client may send it
    outputs: int  # tokens
    remaining: int  # tokens still to come, known to the host
    length: int  # committed columns, filled or to be filled again, known to the host
    ahead: int  # committed columns on the device
    launched: int  # rounds
    filled: int  # prefilled columns
    cached: int  # columns of its prompt in the prefix cache
    first_round: int  # place of its rounds among the drawn rounds
    last_round: int  # and of the next request's
    arrivals: float
    firsts: float
    lasts: float
    first_steps: int
    last_steps: int
    rounds: int
    drafts: int
    preemptions: int
    ends: float  # seconds of the first, second, ... end of any request


@dataclass(slots=True)
class RequestLists:
    """Entries of lists of requests, each as long as the server has places."""

    running: int = 0  # in their order in the batch
    prefilling: int = 0  # in order of admission
    preempted: int = 0  # waiting
    chunk_request: int = 0
    chunk_start: int = 0
    chunk_end: int = 0


@dataclass(slots=True)
class PendingResults:
    """A round or first tokens on the way to the host: two for each of two steps."""

    size: int = 0
    seconds: float = 0.0  # when the host can read them
    step: int = 0
    option: int = 0


@dataclass(slots=True)
class PendingRequest:
    """A request of pending results: as many for each of these as the server has places."""

    request: int = 0
    accepted: int = 0  # drafts


@dataclass(slots=True)
class TabledBatch:
    """Seconds of a round's phases at one batch size, and their least; base below 0: not known."""

    draft: float = -1.0
    draft_least: float = -1.0
    verify: float = -1.0
    verify_least: float = -1.0
    extend: float = -1.0
    extend_least: float = -1.0


@dataclass(slots=True)
class TabledSlope:
    """Seconds per column that layers of one window add to a phase."""

    phase: int  # 0 draft, 1 verify, 2 extend
    seconds: float
    window: float  # most columns of a request
    beyond: float  # columns in addition to a request's context


@dataclass(slots=True)
class LoggedStep:
    """One step of a simulated server. The log of these is emptied when it is full."""

    start: float = 0.0  # seconds
    seconds: float = 0.0
    running: int = 0  # requests in its round
    chunks: int = 0  # number of chunks of prompts
    waiting: int = 0  # requests without a place
    prompt_tokens: int = 0  # in the chunks
    option: int = 0  # of its round, -1 without one
    pages: int = 0  # needed by the requests with a place


class SimulationState(NamedTuple):
    """A running simulation of R requests on P places, with S slopes."""

    settings: Any  # Settings [1]
    server: Any  # Progress [1]
    requests: Any  # Request [R]
    places: Any  # Place [P]
    pending: Any  # Flight [4]: round and first tokens of one step, and of another
    pending_requests: Any  # Passenger [4 P]
    batches: Any  # Batch [P + 1]
    slopes: Any  # Slope [S]
    log: Any  # LoggedStep
    page_counts: Any  # int64 [page_size], pages by tokens in a request's last page, whole pages left out
    drawn: Any  # uint8, accepted drafts round by round
    histogram: Any  # int64 [options · (most_steps + 1)], rounds by accepted drafts
    gaps: Any  # f64, seconds between a request's successive deliveries, emptied when full


TABLES: dict[str, Any] = {
    "settings": ServerSettings,
    "server": ServerProgress,
    "requests": SimulatedRequest,
    "places": RequestLists,
    "pending": PendingResults,
    "pending_requests": PendingRequest,
    "batches": TabledBatch,
    "slopes": TabledSlope,
    "log": LoggedStep,
}


def dtype_of(kind: Any) -> np.dtype:
    """Make the record of a row."""
    return np.dtype((np.record, np.dtype([(field.name, NUMBERS[field.type]) for field in fields(kind)], align=True)))


def table_of(kind: Any, size: int, **columns: Any) -> np.ndarray:
    """Make a table of this many rows from columns; the others have the row's defaults, or 0."""
    table = np.zeros(size, dtype_of(kind))
    for field in fields(kind):
        if isinstance(field.default, (int, float)):
            table[field.name] = field.default
    for name, values in columns.items():
        table[name] = values
    return table


class FirstRow:
    """Attributes of a table's first record; numpy's own take several times as long."""

    _columns: dict[str, np.ndarray]

    def __init__(self, table: np.ndarray) -> None:
        object.__setattr__(self, "_columns", {name: table[name] for name in table.dtype.names or ()})

    def __getattr__(self, name: str) -> Any:
        return self._columns[name].item(0)

    def __setattr__(self, name: str, value: float) -> None:
        self._columns[name][0] = value


def with_objects(state: SimulationState) -> SimulationState:
    """Replace arrays by lists, which the interpreter reads faster."""
    values = {name: value.tolist() for name, value in state._asdict().items() if name != "drawn"}
    for name, kind in TABLES.items():
        values[name] = [kind(*row) for row in values[name]]
    return SimulationState(drawn=state.drawn.tobytes(), **values)


def column(table: np.ndarray | Sequence[Any], name: str, stop: int | None = None) -> np.ndarray:
    """Read the first entries of a column, of all rows by default."""
    if isinstance(table, np.ndarray):
        return table[name][:stop].copy()
    return np.array([getattr(row, name) for row in table[:stop]])
