"""Who sends requests: each at its time, but never more of them under way than the client allows; and the front end
that takes them in one after the other.
"""

import heapq

import numpy as np

from specsim.simulator.workload import Workload


class Client:
    """The requests of a workload on their way to the scheduler, first come, first served.

    intake: seconds that the front end (a connection, a tokenizer) spends on each before the next; latency: seconds in
    which each is under way besides, many at a time.
    """

    def __init__(self, workload: Workload, intake: float = 0.0, latency: float = 0.0):
        self._intake, self._latency, self._idle = intake, latency, 0.0
        arrivals = workload.arrivals_s
        self._arrivals = np.zeros(len(workload)) if arrivals is None else arrivals
        self._limited = workload.concurrency is not None
        # Since when each place of the client is free.
        self._places = [0.0] * min(workload.concurrency, len(workload)) if self._limited else []
        self._next = 0

    @property
    def _sent(self) -> float:
        """When the next request is sent if nothing ends before; infinity where none is, or all places are taken."""
        if self._next == len(self._arrivals) or (self._limited and not self._places):
            return np.inf
        return max(float(self._arrivals[self._next]), self._places[0] if self._limited else 0.0)

    @property
    def next_time(self) -> float:
        """When the next request reaches the scheduler if nothing ends before."""
        return max(self._sent, self._idle) + self._intake + self._latency

    def due(self, now: float) -> list[tuple[float, int]]:
        """(when it was sent, number) of the requests that have reached the scheduler until now."""
        requests = []
        while (there := self.next_time) <= now:
            requests.append((self._sent, self._next))
            self._idle = there - self._latency
            if self._limited:
                heapq.heappop(self._places)
            self._next += 1
        return requests

    def ended(self, seconds: float) -> None:
        """A request has ended: its place is free."""
        if self._limited:
            heapq.heappush(self._places, seconds)
