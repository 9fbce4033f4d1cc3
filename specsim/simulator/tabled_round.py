"""Seconds of a simulated round by the tables of the cost model.

It is compiled with specsim.simulator.steps.
"""

from math import inf

from specsim.simulator.state import MIXED, Batch, State


def look_up_round(state: State) -> bool:
    """Compute the seconds of a round without prompts, if the tables hold its batch size."""
    server = state.server[0]
    settings = state.settings[0]
    size = server.num_running
    batch = state.batches[size]
    if settings.tabled < 0 or batch.verify < 0 or (settings.mode == MIXED and server.num_chunks > 0):
        return False
    total = 0
    for place in range(size):
        total += state.requests[state.places[place].running].ahead
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


def columns(state: State, window: float, beyond: float, total: int) -> float:
    """Count the columns that running requests of `total` columns, and `beyond` more of each, read in a window."""
    size = state.server[0].num_running
    if window == inf:
        return total + beyond * size
    seen = 0.0
    for place in range(size):
        seen += min(state.requests[state.places[place].running].ahead + beyond, window)
    return seen


def round_seconds(batch: Batch, draft: float, verify: float, extend: float, filters: float) -> float:
    """Add the phases of a round, none shorter than its least."""
    verify = max(verify, batch.verify_least) + filters
    return max(draft, batch.draft_least) + verify + max(extend, batch.extend_least)


def exposed_seconds(host: float, device: float, is_hidden: bool) -> float:
    """Compute the seconds of host work that the device waits for; is_hidden: the host works while the device does."""
    return max(0.0, host - device) if is_hidden else host
