"""Places of a simulated server: requests admitted, preempted and ended, their chunks, and results that its host reads.

It is compiled with specsim.simulator.steps.
"""

from typing import Any

from specsim.simulator.state import MIXED, Flight, Progress, Request, State


def count_waiting(server: Progress) -> int:
    """Count the requests without a place."""
    return server.num_preempted + server.num_arrived - server.num_admitted


def pages_of(length: int, page_counts: Any) -> int:
    """Count the pages of the columns that a request of this length needs in its next round."""
    return length // len(page_counts) + page_counts[length % len(page_counts)]


def admit(state: State) -> None:
    """Admit waiting requests in order, up to the first that does not fit."""
    server = state.server[0]
    places = state.places
    while count_waiting(server) > 0 and server.num_running + server.num_prefilling < len(places):
        number = server.num_admitted
        found = -1
        for place in range(server.num_preempted):  # they arrived before those that never had a place
            if places[place].preempted < number:
                number = places[place].preempted
                found = place
        request = state.requests[number]
        pages = pages_of(request.length, state.page_counts)
        if server.pages + pages > state.settings[0].num_pages:
            return
        if found < 0:
            server.num_admitted += 1
        else:
            server.num_preempted -= 1
            places[found].preempted = places[server.num_preempted].preempted
        server.pages += pages
        request.filled = 0 if request.preemptions > 0 else request.cached
        places[server.num_prefilling].prefilling = number
        server.num_prefilling += 1


def preempt(state: State) -> None:
    """Preempt a victim: it waits, and computes the KV of its known tokens again."""
    server = state.server[0]
    places = state.places
    sign = state.settings[0].victim_sign
    victim = -1
    most = 0
    for place in range(server.num_running + server.num_prefilling):
        is_running = place < server.num_running
        number = places[place].running if is_running else places[place - server.num_running].prefilling
        request = state.requests[number]
        columns = sign * (request.length if is_running else request.filled)
        if victim < 0 or columns > most or (columns == most and number > victim):
            victim = number
            most = columns
    kept = 0
    for place in range(server.num_running):
        if places[place].running != victim:
            places[kept].running = places[place].running
            kept += 1
    server.num_running = kept
    drop_prefilling(state, victim)
    request = state.requests[victim]
    request.preemptions += 1
    server.pages -= pages_of(request.length, state.page_counts)
    places[server.num_preempted].preempted = victim
    server.num_preempted += 1


def drop_prefilling(state: State, number: int) -> None:
    """Remove a request from those in prefill, if it is there."""
    kept = 0
    for place in range(state.server[0].num_prefilling):
        if state.places[place].prefilling != number:
            state.places[kept].prefilling = state.places[place].prefilling
            kept += 1
    state.server[0].num_prefilling = kept


def drop_ended(state: State) -> None:
    """Remove requests that have all of their tokens, whether running or waiting after a preemption."""
    server = state.server[0]
    places = state.places
    kept = 0
    for place in range(server.num_running):
        if state.requests[places[place].running].left > 0:
            places[kept].running = places[place].running
            kept += 1
    server.num_running = kept
    kept = 0
    for place in range(server.num_preempted):
        if state.requests[places[place].preempted].left > 0:
            places[kept].preempted = places[place].preempted
            kept += 1
    server.num_preempted = kept


def choose_chunks(state: State) -> None:
    """Choose chunks of prompts for a step, at most `most_tokens` tokens, earlier requests first."""
    server = state.server[0]
    left = state.settings[0].most_tokens
    server.num_chunks = 0
    for place in range(server.num_prefilling):
        number = state.places[place].prefilling
        request = state.requests[number]
        end = min(request.length, request.filled + left)
        if end > request.filled:
            left -= end - request.filled
            chunk = state.places[server.num_chunks]
            chunk.chunk_request = number
            chunk.chunk_start = request.filled
            chunk.chunk_end = end
            server.num_chunks += 1


def read(state: State, half: int) -> None:
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


def read_firsts(state: State, at: int) -> None:
    """Read first tokens."""
    flight = state.flights[at]
    for place in range(flight.size):
        request = state.requests[state.passengers[at * len(state.places) + place].request]
        request.left -= 1
        request.firsts = flight.seconds
        request.lasts = flight.seconds
        request.first_steps = flight.step
        if request.left == 0:
            end(state, request, flight)
    flight.size = 0


def read_round(state: State, at: int) -> None:
    """Read the tokens of a round, and drop those beyond a request's end."""
    server = state.server[0]
    flight = state.flights[at]
    row = flight.option * (state.settings[0].most_steps + 1)
    for place in range(flight.size):
        passenger = state.passengers[at * len(state.places) + place]
        request = state.requests[passenger.request]
        if request.left == 0:  # it ended while this round ran
            continue
        kept = min(passenger.accepted + 1, request.left)
        request.left -= kept
        request.length += kept
        state.gaps[server.num_gaps] = flight.seconds - request.lasts
        server.num_gaps += 1
        request.lasts = flight.seconds
        request.rounds += 1
        request.drafts += passenger.accepted
        state.histogram[row + passenger.accepted] += 1
        if request.left == 0:
            end(state, request, flight)
    flight.size = 0


def end(state: State, request: Request, flight: Flight) -> None:
    """Note the end of a request."""
    request.last_steps = flight.step
    state.requests[state.server[0].num_ended].ends = flight.seconds
    state.server[0].num_ended += 1
