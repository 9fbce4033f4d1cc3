"""Continuous batching on a clock: order of service, seconds of every step, time of every token.

Steps are those of serving.scheduler: arrivals, room for the next round (or preemption), admission, chunks of prompts,
one round of the running requests. Under `overlap` a step is planned before the results of the one before it are known,
so a request that has ended takes part in one more round. The cost model, the policy and the acceptance answer what
specsim.simulator.steps asks.
"""

from collections.abc import Sequence
from dataclasses import fields
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from specsim.core.config import ServingConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.policies.per_request import AnyPolicy, Choice, choose, observe
from specsim.core.policies.policy import Always
from specsim.simulator import steps
from specsim.simulator.acceptance import Cost, DraftedRounds, Option
from specsim.simulator.compiled import loop
from specsim.simulator.cost import CostModel
from specsim.simulator.initial_state import PREFILLS, Prefill, Simulation, initial_state, round_pages
from specsim.simulator.results import Quantiles, SimulatedRun
from specsim.simulator.state import FirstRow, LoggedStep, SimulatedRequest, column, with_objects
from specsim.simulator.uniforms import named_uniforms
from specsim.simulator.workload import SimulatedWorkload


class _Unread(NamedTuple):
    """A round whose results the host has not read."""

    step: int
    requests: np.ndarray  # int64 [B]
    choice: Choice
    accepted: np.ndarray  # int64 [B]
    seconds: float


class _Chunks(NamedTuple):
    """Chunks of prompts of a step."""

    new_tokens: np.ndarray  # int64 [C]
    behind: np.ndarray  # int64 [C], tokens before each


class Server:
    """A simulation and its state.

    steps_loop: specsim.simulator.steps or its compiled copy; None: the one that pays.
    """

    def __init__(self, simulation: Simulation, steps_loop: ModuleType | None = None) -> None:
        self._simulation = simulation
        self._is_answered = simulation.draws == steps.ANSWERED
        self._tabled = simulation.tabled
        self._configs = [option.config for option in simulation.options]
        self._keys = simulation.keys
        self._unread: list[_Unread] = []
        self._is_lagging = simulation.serving.schedule == "overlap"
        self._gaps = Quantiles()
        self._log: list[LoggedStep] = []
        self._loop = steps_loop or loop(int(simulation.workload.output_tokens.sum()))
        state = initial_state(simulation)
        self._state = with_objects(state) if self._loop is steps else state
        self._server: Any = self._state.server[0] if self._loop is steps else FirstRow(state.server)

    def serve(self) -> SimulatedRun:
        """Run until every request has ended."""
        advance = self._loop.advance
        answers = {steps.FULL: self._flush, steps.PREFILL: self._prefill, steps.ROUND: self._round}
        while (need := advance(self._state)) != steps.DONE:
            answers[need]()
        self._flush()
        return self._run()

    def _prefill(self) -> None:
        """Answer with the seconds of a prefill by itself."""
        self._server.seconds = self._simulation.cost.prefill(*self._chunks())

    def _round(self) -> None:
        """Answer with option, seconds and accepted drafts of a round, with chunks of prompts in mode `mixed`."""
        simulation = self._simulation
        requests = column(self._state.places, "running", self._server.num_running)
        contexts = self._request_column("ahead", requests)
        choice = self._chosen(requests) if len(contexts) else Choice(-1)
        option = choice.setting
        config = self._configs[max(option, 0)]
        if self._server.num_chunks and simulation.prefill == "mixed":
            seconds = simulation.cost.mixed(*self._chunks(), contexts, config)
        else:
            seconds = simulation.cost.round(contexts, config)
            self._tabulate(len(contexts))
        self._server.option = option
        self._server.seconds = seconds
        if len(contexts) and self._is_answered:
            accepted = self._accepted(choice, requests, contexts)
            self._unread.append(_Unread(int(self._server.num_steps), requests, choice, accepted, seconds))
            self._write_accepted(accepted)

    def _chosen(self, requests: np.ndarray) -> Choice:
        """Let the policy choose from what the host knows.

        It knows all rounds, under an overlap schedule those up to the one before the last step.
        """
        policy = self._simulation.policy
        num_read = int(self._server.num_steps) - self._is_lagging
        while self._unread and self._unread[0].step < num_read:
            read = self._unread.pop(0)
            observe(policy, read.requests, read.choice, read.accepted, read.seconds)
        return choose(policy, requests, self._request_column("length", requests))

    def _chunks(self) -> _Chunks:
        size = self._server.num_chunks
        starts, ends = (column(self._state.places, name, size) for name in ("chunk_start", "chunk_end"))
        return _Chunks(ends - starts, starts)

    def _tabulate(self, size: int) -> None:
        """Add a batch size to the tables, where rounds are looked up."""
        cost = self._simulation.cost
        if self._tabled is not None and isinstance(cost, CostModel):
            batch = self._state.batches[size]
            for name, part in cost.parts(size, self._configs[self._tabled])._asdict().items():
                setattr(batch, name, part.seconds)
                setattr(batch, f"{name}_least", part.launching)

    def _accepted(self, choice: Choice, requests: np.ndarray, contexts: np.ndarray) -> np.ndarray:
        """Draw the accepted drafts of a round, for each request at most its draft steps."""
        num_steps = self._configs[choice.setting].num_steps
        if not num_steps:
            return np.zeros(len(requests), dtype=np.int64)
        acceptance = self._simulation.options[choice.setting].acceptance
        positions = contexts - self._simulation.workload.prompt_tokens[requests]
        uniforms = named_uniforms(self._keys[requests], positions)
        rounds = DraftedRounds(requests, self._request_column("launched", requests), positions, uniforms)
        return np.minimum(acceptance.accepted(rounds), num_steps if choice.steps is None else choice.steps)

    def _write_accepted(self, accepted: np.ndarray) -> None:
        """Write the accepted drafts where the round will find them."""
        pending_requests = self._state.pending_requests
        first = 2 * self._server.half * self._simulation.places
        if isinstance(pending_requests, np.ndarray):
            pending_requests["accepted"][first : first + len(accepted)] = accepted
            return
        for index, drafts in enumerate(accepted.tolist(), start=first):
            pending_requests[index].accepted = drafts

    def _request_column(self, name: str, requests: np.ndarray) -> np.ndarray:
        """Read a column of some requests, int64."""
        table = self._state.requests
        if isinstance(table, np.ndarray):
            return table[name][requests]
        return np.array([getattr(table[number], name) for number in requests.tolist()], dtype=np.int64)

    def _flush(self) -> None:
        """Read gaps and log, and empty them."""
        state = self._state
        self._gaps.add(np.asarray(state.gaps[: self._server.num_gaps]))
        self._server.num_gaps = 0
        entries = [
            column(state.log, name, self._server.num_logged).tolist() for name in LoggedStep.__dataclass_fields__
        ]
        self._log += map(LoggedStep, *entries)
        self._server.num_logged = 0

    def _run(self) -> SimulatedRun:
        state = self._state
        names = {field.name for field in fields(SimulatedRun)} & {field.name for field in fields(SimulatedRequest)}
        histogram = np.asarray(state.histogram).reshape(len(self._configs), -1)
        return SimulatedRun(
            **{name: column(state.requests, name) for name in names},
            prompt_tokens=self._simulation.workload.prompt_tokens,
            output_tokens=self._simulation.workload.output_tokens,
            gaps=self._gaps,
            accepted_drafts=tuple(
                rounds[: config.num_steps + 1] for rounds, config in zip(histogram, self._configs, strict=True)
            ),
            num_steps=int(self._server.num_steps),
            most_pages=int(self._server.most_pages),
            log=self._log,
        )


def simulate(
    cost: Cost,
    options: Option | Sequence[Option],
    workload: SimulatedWorkload,
    serving: ServingConfig | None = None,
    *,
    prefill: Prefill = "mixed",
    policy: AnyPolicy | None = None,
    seed: int = 0,
    log: bool = False,
) -> SimulatedRun:
    """Serve a workload; the same arguments give the same run, bit for bit.

    prefill: prompts are processed in the round's own forward (`mixed`, as in vLLM), in a separate forward of the same
    step before the round (`beside`, as in serving.scheduler), or in a forward that rounds wait for (`first`, as in
    SGLang). policy: chooses among several options. log: keep a record of every step. serving: by default 256 places,
    slots for all, and the cost model's schedule.
    """
    options = (options,) if isinstance(options, Option) else tuple(options)
    if serving is None:
        serving = ServingConfig(getattr(cost, "schedule", "sync"), max_running=256, num_slots=2**31 - 1)
    check(cost, options, workload, serving, prefill)
    return Server(Simulation(cost, options, workload, serving, prefill, policy or Always(), seed, log)).serve()


def check(
    cost: Cost, options: Sequence[Option], workload: SimulatedWorkload, serving: ServingConfig, prefill: str
) -> None:
    """Raise InputError for a workload or a setting that simulate cannot serve."""
    require_choice("prefill", prefill, PREFILLS)
    if not options or len({option.config.page_size for option in options}) != 1:
        raise InputError("options", f"{len(options)} settings", "at least one, all of one page_size")
    require(not serving.prefix_cache, "prefix_cache", True, "False: requests of a workload have lengths and no tokens")
    schedule = getattr(cost, "schedule", serving.schedule)
    require(schedule == serving.schedule, "schedule", serving.schedule, f"that of the cost model, {schedule}")
    if serving.schedule == "overlap" and any(option.config.release == "round" for option in options):
        raise InputError("schedule", "overlap", "sync with release 'round', which frees slots after every round")
    configs = tuple(option.config for option in options)
    page = configs[0].page_size
    # Lanes' copies of a prefix's tail grow with it: a round from the last token of a page may need most pages.
    last = workload.prompt_tokens + np.maximum(workload.output_tokens - 2, 0)
    fullest = np.maximum(last - last % page - 1, workload.prompt_tokens)
    most = np.maximum(round_pages(last, configs), round_pages(fullest, configs)) * page
    if most.max() > serving.num_slots:
        request = int(most.argmax())
        raise InputError("num_slots", serving.num_slots, f"at least {most[request]}, which request {request} needs")
