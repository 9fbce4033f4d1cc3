"""Data-parallel ranks simulated in one process: one scheduler each, with every phase run in all of them at once.

Ranks of a real server meet in the collectives of each phase. So a rank without work runs a phase as soon as another
rank has work in it.
"""

from collections.abc import Sequence

from specsim.core.errors import InputError
from specsim.serving.requests import Request
from specsim.serving.scheduler import Scheduler
from specsim.serving.trace import StepRecord


class Ranks:
    """Schedulers that step together.

    A request goes to the first with the fewest unfinished requests.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = tuple(schedulers)
        self.scheduler_by_id: dict[int, Scheduler] = {}

    def submit(self, request: Request) -> None:
        """Submit a request to a rank, for a conversation to the rank with its KV."""
        if request.request_id in self.scheduler_by_id:
            raise InputError("request_id", request.request_id, "an id of no other request")
        previous = None if request.continues is None else self.scheduler_by_id.get(request.continues)
        scheduler = previous or min(self.schedulers, key=_load)
        scheduler.submit(request)
        self.scheduler_by_id[request.request_id] = scheduler

    @property
    def is_busy(self) -> bool:
        """Check whether any rank is busy."""
        return any(scheduler.is_busy for scheduler in self.schedulers)

    def run(self) -> None:
        """Step until all requests of all ranks have ended."""
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
        """Run one step of all ranks, each phase in all of them if any has work in it."""
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
