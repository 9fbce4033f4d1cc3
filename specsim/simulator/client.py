"""Who sends requests: each at its time, but never more of them under way than the client allows."""

import heapq

import numpy as np

from specsim.simulator.workload import Workload


class Client:
    """The requests of a workload on their way to the server, first come, first served."""

    def __init__(self, workload: Workload):
        arrivals = workload.arrivals_s
        self._arrivals = np.zeros(len(workload)) if arrivals is None else arrivals
        self._limited = workload.concurrency is not None
        # Since when each place of the client is free.
        self._places = [0.0] * min(workload.concurrency, len(workload)) if self._limited else []
        self._next = 0

    @property
    def next_time(self) -> float:
        """When the next request is sent if nothing ends before; infinity where none is, or all places are taken."""
        if self._next == len(self._arrivals) or (self._limited and not self._places):
            return np.inf
        return max(float(self._arrivals[self._next]), self._places[0] if self._limited else 0.0)

    def due(self, now: float) -> list[tuple[float, int]]:
        """(seconds, number) of the requests that are sent until now."""
        sent = []
        while (at := self.next_time) <= now:
            if self._limited:
                heapq.heappop(self._places)
            sent.append((at, self._next))
            self._next += 1
        return sent

    def ended(self, seconds: float) -> None:
        """A request has ended: its place is free."""
        if self._limited:
            heapq.heappush(self._places, seconds)
