"""Steps of a simulated server, in the subset of Python that numba compiles.

specsim.simulator.compiled makes compiled copies of this file and of those that it imports functions from, so they
import nothing with rules of its own. Compiled or not, results are equal, bit for bit. Requests arrive in the order of
their numbers, as the front end takes them in one after the other.
"""

from math import inf
from typing import Any

from specsim.simulator.places import admit, choose_chunks, count_waiting, drop_prefilling, pages_of, preempt, read
from specsim.simulator.state import FIRST, MIXED, PendingResults, ServerProgress, SimulationState, TabledBatch


def look_up_round(state: SimulationState) -> bool:
    """Compute the seconds of a round without prompts, if the tables hold its batch size."""
    server = state.server[0]
    settings = state.settings[0]
    size = server.num_running
    batch = state.batches[size]
    if settings.tabled < 0 or batch.verify < 0 or (settings.mode == MIXED and server.num_chunks > 0):
        return False
    total = 0
    for index in range(size):
        total += state.requests[state.places[index].running].ahead
    draft = batch.draft
    verify = batch.verify
    extend = batch.extend
    for slope in state.slopes:
        seconds = slope.seconds * columns(state, slope.window, slope.beyond, total)
        if slope.phase == 0:
            draft += seconds
        elif slope.phase == 1:
            verify += seconds
        else:
            extend += seconds
    server.seconds = round_seconds(batch, draft, verify, extend, settings.filters)
    host = settings.host + size * settings.host_request
    server.seconds += exposed_seconds(host, server.seconds, settings.hides_host)
    server.option = settings.tabled
    return True


def columns(state: SimulationState, window: float, beyond: float, total: int) -> float:
    """Count the columns that running requests of `total` columns, and `beyond` more of each, read in a window."""
    size = state.server[0].num_running
    if window == inf:
        return total + beyond * size
    seen = 0.0
    for index in range(size):
        seen += min(state.requests[state.places[index].running].ahead + beyond, window)
    return seen


def round_seconds(batch: TabledBatch, draft: float, verify: float, extend: float, filters: float) -> float:
    """Add the phases of a round, none shorter than its least."""
    verify = max(verify, batch.verify_least) + filters
    return max(draft, batch.draft_least) + verify + max(extend, batch.extend_least)


def exposed_seconds(host: float, device: float, is_hidden: bool) -> float:
    """Compute the seconds of host work that the device waits for; is_hidden: the host works while the device does."""
    return max(0.0, host - device) if is_hidden else host


DONE, FULL, PREFILL, ROUND = range(4)  # results of advance
BEGIN, PREFILLED, ROUNDED = range(3)  # phases of a step: to be planned, or after an answer
PLAIN, DRAWN, ANSWERED = range(3)  # sources of accepted drafts


def advance(state: SimulationState) -> int:
    """Run steps until PREFILL or ROUND needs an answer, a buffer is FULL, or every request has ended."""
    server = state.server[0]
    while True:
        if server.phase == BEGIN:
            if server.num_ended == len(state.requests):
                return DONE
            if server.num_gaps + len(state.places) > len(state.gaps) or server.num_logged == len(state.log):
                return FULL
            plan(state)
            server.phase = PREFILLED
            if has_prefill(state):
                return PREFILL
        elif server.phase == PREFILLED:
            if has_prefill(state):
                prefill(state)
            server.phase = ROUNDED
            if has_round(state) and not look_up_round(state):
                return ROUND
        else:
            if has_round(state):
                run_round(state)
            finish(state)
            server.phase = BEGIN


def has_prefill(state: SimulationState) -> bool:
    """Check whether prompts of this step have a forward of their own."""
    return state.server[0].num_chunks > 0 and state.settings[0].mode != MIXED


def has_round(state: SimulationState) -> bool:
    """Check whether a forward of running requests, or of prompts that may share one, is part of this step."""
    server = state.server[0]
    mode = state.settings[0].mode
    if mode == MIXED:
        return server.num_running + server.num_chunks > 0
    return server.num_running > 0 and not (mode == FIRST and server.num_chunks > 0)


def plan(state: SimulationState) -> None:
    """Take in arrivals, preempt or admit requests, and choose chunks of prompts."""
    server = state.server[0]
    settings = state.settings[0]
    if server.num_running + server.num_prefilling + count_waiting(server) + count_unread(state.pending) == 0:
        there = max(next_sent(state), server.idle) + settings.intake + settings.latency
        server.now = max(server.now, there)
        server.planned = server.now
    server.start = server.now
    server.option = -1
    arrive(state)
    server.pages = 0
    for index in range(server.num_running):
        server.pages += pages_of(state.requests[state.places[index].running].length, state.page_counts)
    for index in range(server.num_prefilling):
        server.pages += pages_of(state.requests[state.places[index].prefilling].length, state.page_counts)
    if server.pages > settings.num_pages:
        while server.pages > settings.num_pages:
            preempt(state)
    else:
        admit(state)
    choose_chunks(state)
    server.running = 0
    server.waiting = count_waiting(server)


def count_unread(pending: Any) -> int:
    """Count the results that the host has not read."""
    return pending[0].size + pending[1].size + pending[2].size + pending[3].size


def next_sent(state: SimulationState) -> float:
    """Compute the time of the next request if none ends before; infinity without one, or without a place for it."""
    server = state.server[0]
    number = server.num_arrived
    before = number - state.settings[0].most_in_flight  # as many requests have ended when this one is sent
    if number == len(state.requests) or before >= server.num_ended:
        return inf
    return max(state.requests[number].coming, state.requests[before].ends if before >= 0 else 0.0)


def arrive(state: SimulationState) -> None:
    """Take in requests that reached the scheduler until the time of the plan."""
    server = state.server[0]
    settings = state.settings[0]
    while True:
        sent = next_sent(state)
        there = max(sent, server.idle) + settings.intake + settings.latency
        if there > server.planned:
            return
        state.requests[server.num_arrived].arrivals = sent
        server.idle = there - settings.latency
        server.num_arrived += 1


def prefill(state: SimulationState) -> None:
    """Run the prompts' own forward, whose results the host reads before the round where it does not lag."""
    server = state.server[0]
    server.now += server.seconds
    join(state)
    if not state.settings[0].is_lagging:
        read(state, server.half)


def join(state: SimulationState) -> None:
    """Produce the first token of every complete prompt; its request runs from the next round on."""
    server = state.server[0]
    at = 2 * server.half + 1
    size = 0
    for index in range(server.num_chunks):
        number = state.places[index].chunk_request
        request = state.requests[number]
        request.filled = state.places[index].chunk_end
        if request.filled < request.length:
            continue
        drop_prefilling(state, number)
        state.places[server.num_running].running = number
        server.num_running += 1
        request.ahead = request.length
        if request.remaining == request.outputs:
            state.pending_requests[at * len(state.places) + size].request = number
            size += 1
    send(state.pending[at], size, server)


def send(results: PendingResults, size: int, server: ServerProgress) -> None:
    """Note the results of a forward that has just ended on the device."""
    results.size = size
    results.seconds = server.now
    results.step = server.num_steps
    results.option = server.option


def run_round(state: SimulationState) -> None:
    """Run the round of the running requests, with chunks of prompts where they share its forward."""
    server = state.server[0]
    server.now += server.seconds
    server.running = server.num_running
    draws = state.settings[0].draws
    first = 2 * server.half * len(state.places)
    for index in range(server.num_running):
        number = state.places[index].running
        request = state.requests[number]
        pending_request = state.pending_requests[first + index]
        pending_request.request = number
        if draws != ANSWERED:
            at = request.first_round + request.launched
            # Beyond its last round a request has ended, which the host does not know yet.
            pending_request.accepted = int(state.drawn[at]) if draws == DRAWN and at < request.last_round else 0
        request.ahead += pending_request.accepted + 1
        request.launched += 1
    send(state.pending[2 * server.half], server.num_running, server)
    if state.settings[0].mode == MIXED and server.num_chunks > 0:
        join(state)


def finish(state: SimulationState) -> None:
    """Read the results that are due, and note the step."""
    server = state.server[0]
    is_lagging = state.settings[0].is_lagging
    read(state, 1 - server.half if is_lagging else server.half)
    launched = server.num_chunks > 0 or server.option >= 0
    server.planned = server.start if is_lagging and launched else server.now
    server.half = 1 - server.half
    if launched:
        server.num_steps += 1
        server.most_pages = max(server.most_pages, server.pages)
        if state.settings[0].keeps_log:
            write_log(state)


def write_log(state: SimulationState) -> None:
    """Keep the numbers of this step."""
    server = state.server[0]
    entry = state.log[server.num_logged]
    entry.start = server.start
    entry.seconds = server.now - server.start
    entry.running = server.running
    entry.chunks = server.num_chunks
    entry.waiting = server.waiting
    entry.prompt_tokens = 0
    for index in range(server.num_chunks):
        entry.prompt_tokens += state.places[index].chunk_end - state.places[index].chunk_start
    entry.option = server.option
    entry.pages = server.pages
    server.num_logged += 1
