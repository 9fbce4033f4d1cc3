"""Runner of a simulated server: a cost model gives the seconds of prefills and rounds, uniforms the accepted drafts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, repeat
from typing import Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from specsim.core.policies.policy import AnyPolicy, Choice, choose
from specsim.serving.requests import Arrival
from specsim.simulator.acceptance import Cost, Distribution, DraftedRounds, Option
from specsim.simulator.cost import CostModel, RoundParts
from specsim.simulator.uniforms import named_uniforms
from specsim.simulator.workload import SimulatedWorkload

Prefill = Literal["mixed", "beside", "first"]
PREFILLS = get_args(Prefill)
REQUESTS = 1024  # drawn together
MOST_UNIFORMS = 2**18  # of a table
MOST_STEPS = 254  # drafts that a byte can count, with the bonus token


class DrawnRounds(NamedTuple):
    """Accepted drafts by request and round."""

    starts: np.ndarray  # int64 [R + 1], first round of each request
    accepted: np.ndarray  # uint8, all rounds of the first request, then those of the next

    def count(self, request: int) -> int:
        """Count the rounds of a request, at least one."""
        return int(self.starts[request + 1] - self.starts[request])

    def of(self, request: int) -> Iterator[int]:
        """Iterate over the rounds of a request, and over rounds after its end, which the host does not know yet."""
        start, stop = self.starts[request : request + 2].tolist()
        return chain(self.accepted[start:stop].tobytes(), repeat(0))

    def totals(self, has_rounds: np.ndarray, histogram: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Count rounds and accepted drafts of each request, and rounds by accepted drafts.

        has_rounds: bool [R], whether a request needs more than its first token. histogram: the last result's shape.
        """
        size = len(histogram)
        counts = -np.bincount(self.accepted[self.starts[:-1][~has_rounds]], minlength=size)
        drafts = []
        for start in range(0, len(has_rounds), REQUESTS):  # numpy copies what it adds in 64 bits
            starts = self.starts[start : start + REQUESTS + 1]
            accepted = self.accepted[starts[0] : starts[-1]]
            counts += np.bincount(accepted, minlength=size)
            drafts.append(np.add.reduceat(accepted, starts[:-1] - starts[0], dtype=np.int64))
        return np.where(has_rounds, np.diff(self.starts), 0), np.where(has_rounds, np.concatenate(drafts), 0), counts

    def contexts(self, request: int, prompt_tokens: int) -> Iterator[int]:
        """Iterate over the committed columns at the start of the same rounds, and of one more."""
        start, stop = self.starts[request : request + 2].tolist()
        return accumulate((self.accepted[start:stop] + 1).tobytes(), initial=prompt_tokens)


def is_drawn_before(option: Option) -> bool:
    """Check whether a setting's acceptance depends on nothing but the request, the round and their uniforms."""
    return isinstance(option.acceptance, Distribution) and option.config.num_steps <= MOST_STEPS


def draw_rounds(option: Option, keys: np.ndarray, workload: SimulatedWorkload) -> DrawnRounds:
    """Draw at least one round of every request with this setting, and all up to its end."""
    blocks = [
        _draw(option, keys, np.arange(start, min(start + REQUESTS, len(keys))), workload.output_tokens)
        for start in range(0, len(keys), REQUESTS)
    ]
    rounds = np.concatenate([block.starts for block in blocks])
    return DrawnRounds(
        np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(rounds)]),
        np.concatenate([block.accepted for block in blocks]),
    )


@lru_cache(maxsize=1)
def _uniforms(keys: bytes, positions: int) -> np.ndarray:
    """Compute the uniforms of these names at the first positions, f64 [R, P], which all settings of a plan read."""
    return named_uniforms(np.frombuffer(keys, dtype=np.uint64)[:, None], np.arange(positions))


def _draw(option: Option, keys: np.ndarray, requests: np.ndarray, output_tokens: np.ndarray) -> DrawnRounds:
    """Draw the rounds of some requests; starts holds their number by request."""
    first = requests[0]
    steps = option.config.num_steps
    most = max(1, int(output_tokens[requests].max()) - 1)
    table = _uniforms(keys[requests].tobytes(), most) if len(requests) * most <= MOST_UNIFORMS else None
    positions = np.zeros(len(requests), dtype=np.int64)
    wanted = output_tokens[requests] - 1  # beyond the first token
    going = np.arange(len(requests))  # with one token too, as a round may run before the host has read it
    drawn = []
    owners = []
    index = 0
    while len(going):
        ids = first + going
        places = positions[going]
        uniforms = named_uniforms(keys[ids], places) if table is None else table[going, places]
        rounds = DraftedRounds(ids, np.full(len(ids), index), places, uniforms)
        accepted = np.minimum(option.acceptance.accepted(rounds), steps)
        drawn.append(accepted.astype(np.uint8))
        owners.append(going.astype(np.uint16))
        positions[going] = places + accepted + 1
        going = going[positions[going] < wanted[going]]
        index += 1
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    return DrawnRounds(np.bincount(owner, minlength=len(requests)), np.concatenate(drawn)[order])


def draw_all(option: Option | None, keys: np.ndarray, workload: SimulatedWorkload) -> DrawnRounds | None:
    """Draw the accepted drafts of every request's rounds, None where they are only known in the round.

    option: of every round, None where a policy chooses.
    """
    if option is None:
        return None
    if not option.config.num_steps:
        starts = np.concatenate([[0], np.cumsum(np.maximum(workload.output_tokens - 1, 1))])
        return DrawnRounds(starts, np.broadcast_to(np.uint8(0), starts[-1]))
    return draw_rounds(option, keys, workload) if is_drawn_before(option) else None


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request with lengths in place of tokens, and the fields of serving.requests.Request that a schedule needs."""

    priority: ClassVar[int] = 0
    continues: ClassVar[None] = None
    abort_at: ClassVar[None] = None
    keep: ClassVar[bool] = False
    prompt_ids: ClassVar[range] = range(1)
    token_ids: ClassVar[tuple] = ()

    request_id: int  # number in the order of arrival
    arrival: int  # step
    sent: float  # seconds
    prompt_tokens: int
    output_tokens: int
    cached: int  # columns of its prompt in the prefix cache
    draws: Iterator[int]  # accepted drafts, or contexts, of its rounds, where they are drawn before
    prefill_len: int  # committed columns, filled or to be filled again, known to the host
    remaining: int  # tokens still to come, known to the host
    committed: int = 0  # columns with final KV, as far as the host knows
    ahead: int = 0  # committed columns on the device
    launched: int = 0  # rounds
    row: int = -1
    num_preemptions: int = 0
    arrived: Arrival | None = None
    error: str | None = None
    finish_reason: str | None = None
    side_outputs: dict[str, Any] | None = None
    first: float = 0.0  # seconds of the first delivery
    last: float = 0.0  # seconds of the last delivery
    first_step: int = 0  # step that launched the first token
    last_step: int = 0  # step that launched the last token
    rounds: int = 0
    drafts: int = 0  # accepted


class SimulatedResults(NamedTuple):
    """Results of a prefill or a round on their way to the host."""

    step: int  # of the scheduler
    ordinal: int  # of the step among those that launched
    is_round: bool
    requests: Sequence[SimulatedRequest]  # of a prefill: those that get their first token
    accepted: Sequence[int]  # drafts of each request in a round
    choice: Choice
    ready: float  # seconds, when the host can read them
    duration: float  # seconds of the round


class Chunks(NamedTuple):
    """Chunks of prompts of a step."""

    new_tokens: np.ndarray  # int64 [C]
    behind: np.ndarray  # int64 [C], tokens before each

    @classmethod
    def of(cls, chunks: Sequence[tuple[int, int]]) -> "Chunks":
        """Make the chunks of (start, end) pairs."""
        starts, ends = np.array(chunks, dtype=np.int64).reshape(-1, 2).T
        return cls(ends - starts, starts)


class SimulatedAdaptation:
    """The policy of a simulated server."""

    def __init__(self, policy: AnyPolicy) -> None:
        self._policy = policy

    def choose(self, step: int, requests: Sequence[SimulatedRequest], now: float) -> Choice:
        """Let the policy choose from what the host knows; -1 without requests."""
        lengths = np.array([request.prefill_len for request in requests])
        return choose(self._policy, numbers(requests), lengths) if requests else Choice(-1)


def numbers(requests: Sequence[SimulatedRequest]) -> np.ndarray:
    """List the numbers of requests, int64 [B]."""
    return np.array([request.request_id for request in requests], dtype=np.int64)


class SimulatedRunner:
    """Prefills and rounds that take the seconds of a cost model."""

    def __init__(
        self, cost: Cost, options: Sequence[Option], prefill: Prefill, fixed: int | None, keys: np.ndarray
    ) -> None:
        self.requests: list[SimulatedRequest] = []  # the running batch
        self.now = 0.0  # seconds
        self.ordinal = 0  # of the step among those that launched
        self.shared_chunks: Chunks | None = None  # chunks of prompts in the next round's forward
        self.draws: Literal["accepted", "contexts", None] = None  # what requests have of their rounds
        self._contexts: list[Iterator[int]] = []  # of the running batch's rounds
        self._cost: Any = cost
        self._options = options
        self._prefill = prefill
        self._keys = keys  # names of the requests' uniforms, uint64 [R]
        self._fixed = None if fixed is None else Choice(fixed)
        self._parts: dict[int, RoundParts] = {}  # of a fixed setting's rounds, by batch size

    def prefill(
        self, step: int, requests: Sequence[SimulatedRequest], chunks: Sequence[tuple[int, int]]
    ) -> SimulatedResults:
        """Run chunks of prompts, in their own forward unless a round has shared it; complete ones join the batch."""
        if self._prefill != "mixed":
            self.now += self._cost.prefill(*Chunks.of(chunks))
        fresh = []
        for request, (_, end) in zip(requests, chunks, strict=True):
            if end == request.prefill_len:
                request.ahead = end
                self.requests.append(request)
                self._contexts.append(request.draws)
                if request.remaining == request.output_tokens:
                    fresh.append(request)
        return SimulatedResults(step, self.ordinal, False, fresh, (), Choice(-1), self.now, 0.0)

    def round(self, step: int, choice: Choice) -> SimulatedResults:
        """Run a round of the batch, with the shared chunks."""
        requests = [*self.requests]
        choice = (self._fixed or choice) if requests else Choice(-1)
        if self.draws == "contexts":
            seconds = self._round_seconds(list(map(next, self._contexts)), choice)
            self.now += seconds
            return SimulatedResults(step, self.ordinal, True, requests, (), choice, self.now, seconds)
        seconds = self._round_seconds([request.ahead for request in requests], choice)
        self.now += seconds
        accepted = [next(request.draws) for request in requests] if self.draws else self._accepted(choice, requests)
        for request, count in zip(requests, accepted, strict=True):
            request.ahead += count + 1
        return SimulatedResults(step, self.ordinal, True, requests, accepted, choice, self.now, seconds)

    def _round_seconds(self, contexts: list[int], choice: Choice) -> float:
        cost = self._cost
        config = self._options[max(choice.setting, 0)].config
        if self.shared_chunks is not None:
            if type(cost) is CostModel:
                return cost.mixed_of(*self.shared_chunks, contexts, config)
            return cost.mixed(*self.shared_chunks, np.array(contexts, dtype=np.int64), config)
        if self._fixed is None or type(cost) is not CostModel:
            return cost.round(np.array(contexts, dtype=np.int64), config)
        size = len(contexts)
        if size not in self._parts:
            self._parts[size] = cost.parts(size, config)
        return cost.seconds_of(self._parts[size], contexts, config)

    def _accepted(self, choice: Choice, requests: Sequence[SimulatedRequest]) -> list[int]:
        """Draw the accepted drafts of a round, for each request at most its draft steps."""
        option = self._options[choice.setting]
        num_steps = option.config.num_steps
        if not num_steps or not requests:
            for request in requests:
                request.launched += 1
            return [0] * len(requests)
        indices, positions = np.array(
            [(request.launched, request.ahead - request.prompt_tokens) for request in requests], dtype=np.int64
        ).T
        ids = numbers(requests)
        rounds = DraftedRounds(ids, indices, positions, named_uniforms(self._keys[ids], positions))
        for request in requests:
            request.launched += 1
        most = num_steps if choice.steps is None else choice.steps
        return np.minimum(option.acceptance.accepted(rounds), most).tolist()

    def drop(self, requests: Sequence[SimulatedRequest]) -> None:
        """Remove requests from the batch."""
        dropped = set(map(id, requests))
        self.requests = [request for request in self.requests if id(request) not in dropped]
        self._contexts = [request.draws for request in self.requests]

    def side_outputs(self, request: SimulatedRequest) -> dict[str, Any]:
        """Give no side outputs, which tokens would have."""
        return {}

    def finish(self, request: SimulatedRequest) -> None:
        """Forget nothing of a request that has ended."""
