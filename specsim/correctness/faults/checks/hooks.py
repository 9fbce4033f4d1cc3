"""What a drafter's forwards are given and make, seen where it happens, eagerly and in replayed graphs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Forward:
    """One forward of a drafter's head. positions, slots: of its rows; logits: those made of its hidden states."""

    positions: torch.Tensor
    slots: torch.Tensor
    logits: torch.Tensor | None = None

    def copy(self) -> "Forward":
        """As it is now, on the host."""
        logits = None if self.logits is None else self.logits.to("cpu", copy=True)
        return Forward(self.positions.to("cpu", copy=True), self.slots.to("cpu", copy=True), logits)


class Eye:
    """A drafter's head that keeps its forwards in `seen`."""

    def __init__(self, head: Any):
        self._head, self.seen, self.recorded = head, [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def forward(self, input_ids: torch.Tensor, hidden: torch.Tensor, metadata: Any, kv: Any) -> torch.Tensor:
        out = self._head.forward(input_ids, hidden, metadata, kv)
        # In a graph the copies are recorded with the rest, so that every replay makes them anew.
        self.recorded.append(Forward(metadata.positions.clone(), metadata.slots.clone()))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = self._head.logits(hidden)
        if self.recorded and self.recorded[-1].logits is None:
            self.recorded[-1].logits = out.clone()
        return out

    def take(self) -> list[Forward]:
        """The forwards since the last time."""
        seen, self.seen, self.recorded = [*self.seen, *(each.copy() for each in self.recorded)], [], []
        return seen


class SeenGraph:
    """A graph whose replays are seen."""

    def __init__(self, graph: Any, eye: Eye, forwards: list[Forward]):
        self._graph, self._eye, self._forwards = graph, eye, forwards

    def replay(self) -> None:
        self._graph.replay()
        self._eye.seen += [each.copy() for each in self._forwards]


@contextmanager
def opened(engine: Any) -> Iterator[Eye | None]:
    """An eye on the drafter of an engine of either column; None where it has no head."""
    drafter = engine.drafter
    if not hasattr(drafter, "_head"):
        yield None
        return
    eye = drafter._head = Eye(drafter._head)
    if engine.options.impl != "fast":
        yield eye
        return
    from specsim.fast import engine as module

    capture = module.capture

    def seen_capture(work, device):
        def last_run() -> None:  # a capture may begin with a run that warms up
            eye.recorded.clear()
            work()

        eye.take()
        graph = capture(last_run, device)
        recorded, eye.recorded = eye.recorded, []
        return SeenGraph(graph, eye, recorded)

    module.capture = seen_capture
    try:
        yield eye
    finally:
        module.capture = capture
