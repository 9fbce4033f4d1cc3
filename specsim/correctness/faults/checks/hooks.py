"""Hooks on a drafter: inputs and outputs of its forwards, eagerly and in replayed graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class HeadForward:
    """One forward of a drafter's head."""

    positions: torch.Tensor  # of its rows, as the slots are
    slots: torch.Tensor
    logits: torch.Tensor | None = None  # made from its hidden states

    def copy(self) -> "HeadForward":
        """Copy it to the host."""
        logits = None if self.logits is None else self.logits.to("cpu", copy=True)
        return HeadForward(self.positions.to("cpu", copy=True), self.slots.to("cpu", copy=True), logits)


class HeadHook:
    """A drafter's head that records its forwards in `seen`."""

    def __init__(self, head: Any) -> None:
        self._head = head
        self.seen: list[HeadForward] = []
        self.recorded: list[HeadForward] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor, metadata: Any, kv: Any) -> torch.Tensor:
        out = self._head.forward(input_ids, hidden, metadata, kv)
        # In a graph the copies are captured too, so that every replay repeats them.
        self.recorded.append(HeadForward(metadata.positions.clone(), metadata.slots.clone()))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._head.logits(hidden)
        if self.recorded and self.recorded[-1].logits is None:
            self.recorded[-1].logits = out.clone()
        return out

    def take(self) -> list[HeadForward]:
        """Return the forwards since the last call."""
        seen = [*self.seen, *(forward.copy() for forward in self.recorded)]
        self.seen = []
        self.recorded = []
        return seen


class HookedGraph:
    """A graph that shows the forwards of its replays to a hook."""

    def __init__(self, graph: Any, hook: HeadHook, forwards: list[HeadForward]) -> None:
        self._graph = graph
        self._hook = hook
        self._forwards = forwards

    def replay(self) -> None:
        self._graph.replay()
        self._hook.seen += [forward.copy() for forward in self._forwards]


@contextmanager
def hooked(engine: Any) -> Iterator[HeadHook | None]:
    """Hook the drafter of an engine of either implementation; None where it has no head that runs in steps."""
    drafter = engine.drafter
    if drafter.block_rows or not hasattr(drafter, "_head"):
        yield None
        return
    hook = HeadHook(drafter._head)
    drafter._head = hook
    if engine.options.impl != "fast":
        yield hook
        return
    from specsim.fast import frames as module

    capture = module.capture

    def hooked_capture(work: Callable[[], None], device: torch.device) -> HookedGraph:
        def last_run() -> None:  # a capture may begin with a run that warms up
            hook.recorded.clear()
            work()

        hook.take()
        graph = capture(last_run, device)
        recorded = hook.recorded
        hook.recorded = []
        return HookedGraph(graph, hook, recorded)

    module.capture = hooked_capture
    try:
        yield hook
    finally:
        module.capture = capture
