"""Data-parallel ranks, simulated in one process: a scheduler each, and every phase at the same time in all of them.

Ranks of a real server meet in collectives inside each phase, so that a rank with nothing to do has to pass through a
phase as soon as another one has work in it.
"""

from collections.abc import Sequence

from specsim.core.errors import InputError
from specsim.serving.requests import Request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import StepRecord


class Ranks:
    """Schedulers that step together; a request goes to the rank that has the fewest to finish, the first of equals."""

    def __init__(self, schedulers: Sequence[Scheduler]):
        self.schedulers = tuple(schedulers)
        self.home: dict[int, Scheduler] = {}

    def submit(self, request: Request) -> None:
        """A conversation stays where its KV is."""
        if request.request_id in self.home:
            raise InputError("request_id", request.request_id, "an id that no other request has")
        scheduler = self.home.get(request.continues) or min(self.schedulers, key=_load)
        scheduler.submit(request)
        self.home[request.request_id] = scheduler

    @property
    def is_busy(self) -> bool:
        """Whether a rank is."""
        return any(scheduler.is_busy for scheduler in self.schedulers)

    def run(self) -> None:
        """Steps until every request of every rank has ended."""
        while self.is_busy:
            events = [scheduler.next_event for scheduler in self.schedulers if scheduler.is_busy]
            if None not in events:
                for scheduler in self.schedulers:
                    scheduler.skip_to(min(events))
            self.step()
            if all(scheduler.is_stalled for scheduler in self.schedulers if scheduler.is_busy):
                for scheduler in self.schedulers:
                    scheduler.check_not_stalled()

    def step(self) -> tuple[StepRecord, ...]:
        """One step of every rank: prefill and round in all of them if in any."""
        plans = [scheduler.plan() for scheduler in self.schedulers]
        prefills = any(plan.requests for plan in plans)
        if prefills:
            for scheduler, plan in zip(self.schedulers, plans, strict=True):
                scheduler.prefill(plan)
        decodes = any(scheduler.runner.requests for scheduler in self.schedulers)
        if decodes:
            for scheduler in self.schedulers:
                scheduler.decode()
        return tuple(scheduler.end_step() for scheduler in self.schedulers)


def _load(scheduler: Scheduler) -> int:
    return sum(request.finish_reason is None for request in scheduler.requests.values())
