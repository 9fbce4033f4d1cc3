"""A client that sends requests, and a front end that takes them in one after the other."""

import heapq
from typing import NamedTuple

import numpy as np

from specsim.simulator.workload import Workload


class Arrival(NamedTuple):
    """A request that has reached the scheduler."""

    sent: float  # seconds
    request: int  # its number


class Client:
    """Requests of a workload on their way to the scheduler, first come, first served.

    A request is sent at its time, but at most `concurrency` of them are in flight.
    """

    def __init__(self, workload: Workload) -> None:
        self._intake = workload.intake
        self._latency = workload.latency
        self._idle = 0.0  # when the front end is free
        arrivals = workload.arrivals_s
        self._arrivals = np.zeros(len(workload)) if arrivals is None else arrivals
        limit = workload.concurrency
        self._free_since = None if limit is None else [0.0] * min(limit, len(workload))  # a heap of the client's places
        self._next = 0

    @property
    def _sent(self) -> float:
        """Time of the next request if none ends before; infinity if there is none or all places are taken."""
        if self._next == len(self._arrivals) or self._free_since == []:
            return np.inf
        return max(float(self._arrivals[self._next]), self._free_since[0] if self._free_since else 0.0)

    @property
    def next_time(self) -> float:
        """Time at which the next request reaches the scheduler if none ends before."""
        return max(self._sent, self._idle) + self._intake + self._latency

    def due(self, now: float) -> list[Arrival]:
        """List the requests that reached the scheduler after the last call and until now."""
        requests = []
        while (there := self.next_time) <= now:
            requests.append(Arrival(self._sent, self._next))
            self._idle = there - self._latency
            if self._free_since:
                heapq.heappop(self._free_since)
            self._next += 1
        return requests

    def ended(self, seconds: float) -> None:
        """Free the place of a finished request."""
        if self._free_since is not None:
            heapq.heappush(self._free_since, seconds)
