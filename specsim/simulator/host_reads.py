"""Results that the host of a simulated server reads after a step.

It is compiled with specsim.simulator.steps.
"""

from specsim.simulator.places import drop_ended
from specsim.simulator.state import MIXED, Flight, Request, State


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
