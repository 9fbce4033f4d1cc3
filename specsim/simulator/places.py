"""Places of a simulated server: requests admitted, preempted and ended, their chunks, and results that its host reads.

It is compiled with specsim.simulator.steps.
"""

from typing import Any

from specsim.simulator.state import MIXED, PendingResults, ServerProgress, SimulatedRequest, SimulationState


def count_waiting(server: ServerProgress) -> int:
    """Count the requests without a place."""
    return server.num_preempted + server.num_arrived - server.num_admitted


def pages_of(length: int, page_counts: Any) -> int:
    """Count the pages of the columns that a request of this length needs in its next round."""
    return length // len(page_counts) + page_counts[length % len(page_counts)]


def admit(state: SimulationState) -> None:
    """Admit waiting requests in order, up to the first that does not fit."""
    server = state.server[0]
    places = state.places
    while count_waiting(server) > 0 and server.num_running + server.num_prefilling < len(places):
        number = server.num_admitted
        preempted_at = -1
        for index in range(server.num_preempted):  # they arrived before those that never had a place
            if places[index].preempted < number:
                number = places[index].preempted
                preempted_at = index
        request = state.requests[number]
        pages = pages_of(request.length, state.page_counts)
        if server.pages + pages > state.settings[0].num_pages:
            return
        if preempted_at < 0:
            server.num_admitted += 1
        else:
            server.num_preempted -= 1
            places[preempted_at].preempted = places[server.num_preempted].preempted
        server.pages += pages
        request.filled = 0 if request.preemptions > 0 else request.cached
        places[server.num_prefilling].prefilling = number
        server.num_prefilling += 1


def preempt(state: SimulationState) -> None:
    """Preempt a victim: it waits, and computes the KV of its known tokens again."""
    server = state.server[0]
    places = state.places
    sign = state.settings[0].victim_sign
    victim = -1
    most = 0
    for index in range(server.num_running + server.num_prefilling):
        is_running = index < server.num_running
        number = places[index].running if is_running else places[index - server.num_running].prefilling
        request = state.requests[number]
        columns = sign * (request.length if is_running else request.filled)
        if victim < 0 or columns > most or (columns == most and number > victim):
            victim = number
            most = columns
    size = 0
    for index in range(server.num_running):
        if places[index].running != victim:
            places[size].running = places[index].running
            size += 1
    server.num_running = size
    drop_prefilling(state, victim)
    request = state.requests[victim]
    request.preemptions += 1
    server.pages -= pages_of(request.length, state.page_counts)
    places[server.num_preempted].preempted = victim
    server.num_preempted += 1


def drop_prefilling(state: SimulationState, number: int) -> None:
    """Remove a request from those in prefill, if it is there."""
    size = 0
    for index in range(state.server[0].num_prefilling):
        if state.places[index].prefilling != number:
            state.places[size].prefilling = state.places[index].prefilling
            size += 1
    state.server[0].num_prefilling = size


def drop_ended(state: SimulationState) -> None:
    """Remove requests that have all of their tokens, whether running or waiting after a preemption."""
    server = state.server[0]
    places = state.places
    size = 0
    for index in range(server.num_running):
        if state.requests[places[index].running].remaining > 0:
            places[size].running = places[index].running
            size += 1
    server.num_running = size
    size = 0
    for index in range(server.num_preempted):
        if state.requests[places[index].preempted].remaining > 0:
            places[size].preempted = places[index].preempted
            size += 1
    server.num_preempted = size


def choose_chunks(state: SimulationState) -> None:
    """Choose chunks of prompts for a step, at most `most_tokens` tokens, earlier requests first."""
    server = state.server[0]
    budget = state.settings[0].most_tokens
    server.num_chunks = 0
    for index in range(server.num_prefilling):
        number = state.places[index].prefilling
        request = state.requests[number]
        end = min(request.length, request.filled + budget)
        if end > request.filled:
            budget -= end - request.filled
            chunk = state.places[server.num_chunks]
            chunk.chunk_request = number
            chunk.chunk_start = request.filled
            chunk.chunk_end = end
            server.num_chunks += 1


def read(state: SimulationState, half: int) -> None:
    """Read a step's tokens on the host, in the order of its forwards, and remove ended requests."""
    before = state.server[0].num_ended
    if state.settings[0].mode == MIXED:
        read_round(state, 2 * half)
        read_firsts(state, 2 * half + 1)
    else:
        read_firsts(state, 2 * half + 1)
        read_round(state, 2 * half)
    if state.server[0].num_ended > before:
        drop_ended(state)


def read_firsts(state: SimulationState, at: int) -> None:
    """Read first tokens."""
    results = state.pending[at]
    for index in range(results.size):
        request = state.requests[state.pending_requests[at * len(state.places) + index].request]
        request.remaining -= 1
        request.firsts = results.seconds
        request.lasts = results.seconds
        request.first_steps = results.step
        if request.remaining == 0:
            end(state, request, results)
    results.size = 0


def read_round(state: SimulationState, at: int) -> None:
    """Read the tokens of a round, and drop those beyond a request's end."""
    server = state.server[0]
    results = state.pending[at]
    row = results.option * (state.settings[0].most_steps + 1)
    for index in range(results.size):
        pending_request = state.pending_requests[at * len(state.places) + index]
        request = state.requests[pending_request.request]
        if request.remaining == 0:  # it ended while this round ran
            continue
        num_tokens = min(pending_request.accepted + 1, request.remaining)
        request.remaining -= num_tokens
        request.length += num_tokens
        state.gaps[server.num_gaps] = results.seconds - request.lasts
        server.num_gaps += 1
        request.lasts = results.seconds
        request.rounds += 1
        request.drafts += pending_request.accepted
        state.histogram[row + pending_request.accepted] += 1
        if request.remaining == 0:
            end(state, request, results)
    results.size = 0


def end(state: SimulationState, request: SimulatedRequest, results: PendingResults) -> None:
    """Note the end of a request."""
    request.last_steps = results.step
    state.requests[state.server[0].num_ended].ends = results.seconds
    state.server[0].num_ended += 1
