"""Data-parallel ranks simulated in one process: a scheduler each, and every phase at the same time in all of them.

Ranks of a real server meet in collectives inside each phase, so a rank without work runs a phase as soon as another
rank has work in it.
"""

from collections.abc import Sequence

from specsim.core.errors import InputError
from specsim.serving.requests import Request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import StepRecord


class Ranks:
    """Schedulers that step together; a request goes to the first rank with the fewest unfinished requests."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = tuple(schedulers)
        self.home: dict[int, Scheduler] = {}

    def submit(self, request: Request) -> None:
        """Hand a request to a rank; a conversation stays where its KV is."""
        if request.request_id in self.home:
            raise InputError("request_id", request.request_id, "an id that no other request has")
        previous = None if request.continues is None else self.home.get(request.continues)
        scheduler = previous or min(self.schedulers, key=_load)
        scheduler.submit(request)
        self.home[request.request_id] = scheduler

    @property
    def is_busy(self) -> bool:
        """Whether any rank is busy."""
        return any(scheduler.is_busy for scheduler in self.schedulers)

    def run(self) -> None:
        """Step until every request of every rank has ended."""
        while self.is_busy:
            busy = [scheduler for scheduler in self.schedulers if scheduler.is_busy]
            events = [event for scheduler in busy if (event := scheduler.next_event) is not None]
            if len(events) == len(busy):
                for scheduler in self.schedulers:
                    scheduler.skip_to(min(events))
            self.step()
            if all(scheduler.is_stalled for scheduler in self.schedulers if scheduler.is_busy):
                for scheduler in self.schedulers:
                    scheduler.check_not_stalled()

    def step(self) -> tuple[StepRecord, ...]:
        """Run one step of every rank: prefill and round in all of them if in any."""
        plans = [scheduler.plan() for scheduler in self.schedulers]
        if any(plan.requests for plan in plans):
            for scheduler, plan in zip(self.schedulers, plans, strict=True):
                scheduler.prefill(plan)
        if any(scheduler.runner.requests for scheduler in self.schedulers):
            for scheduler in self.schedulers:
                scheduler.decode()
        return tuple(scheduler.end_step() for scheduler in self.schedulers)


def _load(scheduler: Scheduler) -> int:
    return sum(request.finish_reason is None for request in scheduler.requests.values())
