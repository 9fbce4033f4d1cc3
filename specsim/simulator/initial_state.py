"""A simulation's arguments, and the state of specsim.simulator.steps in which it begins."""

from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple, get_args

import numpy as np

from specsim.core.config import ServingConfig, SpecConfig
from specsim.core.policies.per_request import AnyPolicy
from specsim.core.policies.policy import Always
from specsim.simulator import steps
from specsim.simulator.acceptance import Cost, Distribution, DraftedRounds, Option
from specsim.simulator.cost import CostModel
from specsim.simulator.state import (
    LoggedStep,
    PendingRequest,
    PendingResults,
    RequestLists,
    ServerProgress,
    ServerSettings,
    SimulatedRequest,
    SimulationState,
    TabledBatch,
    TabledSlope,
    table_of,
)
from specsim.simulator.uniforms import UniformStream, keys, named_uniforms
from specsim.simulator.workload import SimulatedWorkload


def round_columns(lengths: np.ndarray, config: SpecConfig) -> np.ndarray:
    """Compute the most columns, int64 [B], that requests of these lengths [B] own in their next round."""
    columns = _reach(lengths, config)
    page = config.page_size
    return -(-columns // page) * page if config.release == "finish" else columns


def round_pages(lengths: np.ndarray, configs: tuple[SpecConfig, ...]) -> np.ndarray:
    """Compute the pages of these columns, int64 [B], where the next round may have any of several settings.

    All settings have the same page size.
    """
    columns = _reach(lengths, configs[0])
    for config in configs[1:]:
        columns = np.maximum(columns, _reach(lengths, config))
    return -(-columns // configs[0].page_size)


def _reach(lengths: np.ndarray, config: SpecConfig) -> np.ndarray:
    """Compute the same columns before rounding to whole pages."""
    if config.release == "finish":
        return np.minimum(lengths, config.length_limit) + 2 * config.need
    page = config.page_size
    tail = 0 if config.lanes_share_prefix else lengths % page
    stride = config.num_steps if config.lanes_share_prefix else -(-(tail + config.num_steps) // page) * page
    return np.maximum(lengths - tail + config.topk * stride, lengths + config.num_draft_tokens)


REQUESTS = 1024  # drawn together
MOST_STEPS = 255  # drafts that a byte can count


class DrawnRounds(NamedTuple):
    """Accepted drafts by request and round."""

    starts: np.ndarray  # int64 [R + 1], first round of each request
    accepted: np.ndarray  # uint8, all rounds of the first request, then those of the next


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


def _draw(option: Option, keys: np.ndarray, requests: np.ndarray, output_tokens: np.ndarray) -> DrawnRounds:
    """Draw the rounds of some requests; starts holds their number by request."""
    first = requests[0]
    steps = option.config.num_steps
    positions = np.zeros(len(requests), dtype=np.int64)
    wanted = output_tokens[requests] - 1  # beyond the first token
    going = np.arange(len(requests))  # with one token too, as a round may run before the host has read it
    drawn = []
    owners = []
    index = 0
    while len(going):
        ids = first + going
        places = positions[going]
        rounds = DraftedRounds(ids, np.full(len(ids), index), places, named_uniforms(keys[ids], places))
        accepted = np.minimum(option.acceptance.accepted(rounds), steps)
        drawn.append(accepted.astype(np.uint8))
        owners.append(going.astype(np.uint16))
        positions[going] = places + accepted + 1
        going = going[positions[going] < wanted[going]]
        index += 1
    owner = np.concatenate(owners)
    order = np.argsort(owner, kind="stable")
    return DrawnRounds(np.bincount(owner, minlength=len(requests)), np.concatenate(drawn)[order])


Prefill = Literal["mixed", "beside", "first"]
PREFILLS = get_args(Prefill)
VICTIMS = {"latest": 0, "shortest": -1, "longest": 1}
BUFFER = 2**13  # gaps, and steps of the log, kept before they are read
NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Simulation:
    """Arguments of simulate, which describes them."""

    cost: Cost
    options: tuple[Option, ...]
    workload: SimulatedWorkload
    serving: ServingConfig
    prefill: Prefill
    policy: AnyPolicy
    seed: int
    log: bool

    @property
    def places(self) -> int:
        """Most requests that hold a place at once."""
        return min(self.serving.max_running, len(self.workload))

    @property
    def keys(self) -> np.ndarray:
        """Names of the requests' uniforms, uint64 [R]."""
        return keys(self.seed, UniformStream.ROUND, np.arange(len(self.workload)))

    @property
    def most_steps(self) -> int:
        """Largest number of drafts on a path, of all options."""
        return max(option.config.num_steps for option in self.options)

    @property
    def fixed(self) -> int | None:
        """The option of every round, None where a policy chooses."""
        return self.policy.setting if type(self.policy) is Always else None

    @property
    def draws(self) -> int:
        """Source of the accepted drafts: steps.PLAIN, DRAWN or ANSWERED."""
        if self.fixed is None:
            return steps.ANSWERED
        option = self.options[self.fixed]
        if not option.config.num_steps:
            return steps.PLAIN
        return steps.DRAWN if is_drawn_before(option) else steps.ANSWERED

    @property
    def tabled(self) -> int | None:
        """The option whose rounds need no answer once their batch size is known, None without one."""
        is_known = type(self.cost) is CostModel and self.draws != steps.ANSWERED
        return self.fixed if is_known else None


def initial_state(simulation: Simulation) -> SimulationState:
    """Make the state before the first step, all arrays."""
    work = simulation.workload
    places = simulation.places
    drawn = DrawnRounds(np.zeros(len(work) + 1, dtype=np.int64), np.zeros(0, dtype=np.uint8))
    if simulation.draws == steps.DRAWN:
        drawn = draw_rounds(simulation.options[simulation.fixed or 0], simulation.keys, work)
    return SimulationState(
        settings=_settings(simulation),
        server=table_of(ServerProgress, 1),
        requests=_requests(work, drawn),
        places=table_of(RequestLists, places),
        pending=table_of(PendingResults, 4),
        pending_requests=table_of(PendingRequest, 4 * places),
        batches=table_of(TabledBatch, places + 1),
        slopes=_slopes(simulation),
        log=table_of(LoggedStep, BUFFER if simulation.log else 1),
        page_counts=_page_counts(simulation),
        drawn=drawn.accepted,
        histogram=np.zeros(len(simulation.options) * (simulation.most_steps + 1), dtype=np.int64),
        gaps=np.zeros(max(BUFFER, places)),
    )


def _requests(work: SimulatedWorkload, drawn: DrawnRounds) -> np.ndarray:
    return table_of(
        SimulatedRequest,
        len(work),
        coming=0.0 if work.arrivals_s is None else work.arrivals_s,
        outputs=work.output_tokens,
        remaining=work.output_tokens,
        length=work.prompt_tokens,
        cached=work.cached_columns,
        first_round=drawn.starts[:-1],
        last_round=drawn.starts[1:],
    )


def _settings(simulation: Simulation) -> np.ndarray:
    serving = simulation.serving
    work = simulation.workload
    cost = simulation.cost
    settings = {
        "mode": PREFILLS.index(simulation.prefill),
        "is_lagging": serving.schedule == "overlap",
        "victim_sign": VICTIMS[serving.preemption],
        "num_pages": serving.num_slots // simulation.options[0].config.page_size,
        "most_tokens": NO_LIMIT if serving.chunk_tokens is None else min(serving.chunk_tokens, NO_LIMIT),
        "most_in_flight": len(work) if work.concurrency is None else work.concurrency,
        "intake": work.intake,
        "latency": work.latency,
        "draws": simulation.draws,
        "most_steps": simulation.most_steps,
        "keeps_log": simulation.log,
        "tabled": -1 if simulation.tabled is None else simulation.tabled,
    }
    if isinstance(cost, CostModel):
        settings["filters"] = cost.efficiency.filters
        fixed = simulation.options[simulation.fixed or 0].config  # the only one whose rounds are looked up
        settings["host"] = cost.host(fixed)
        settings["host_request"] = cost.efficiency.host_request
        settings["hides_host"] = cost.schedule == "overlap"
    return table_of(ServerSettings, 1, **settings)


def _page_counts(simulation: Simulation) -> np.ndarray:
    """Count pages by tokens in the last page: a request that is longer by a page needs one page more."""
    configs = tuple(option.config for option in simulation.options)
    return round_pages(np.arange(configs[0].page_size), configs)


def _slopes(simulation: Simulation) -> np.ndarray:
    cost = simulation.cost
    if simulation.tabled is None or not isinstance(cost, CostModel):
        return table_of(TabledSlope, 0)
    parts = cost.parts(1, simulation.options[simulation.tabled].config)
    slopes = [(phase, slope) for phase, part in enumerate(parts) for slope in part.slopes]
    return table_of(
        TabledSlope,
        len(slopes),
        phase=[phase for phase, _ in slopes],
        seconds=[slope.seconds for _, slope in slopes],
        window=[inf if slope.window is None else slope.window for _, slope in slopes],
        beyond=[slope.beyond for _, slope in slopes],
    )
