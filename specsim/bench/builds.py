"""One-off work inside a timed part: graphs that were recorded, kernels that were loaded, memory that was obtained."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from specsim.core.engine import Engine


@dataclass(slots=True)
class Builds:
    """Work that a repetition of the same part does not do again."""

    graphs: list[str] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)  # loaded into the GPU, most of them compiled just before
    blocks: int = 0  # of memory, obtained from the driver

    @property
    def delays(self) -> list[str]:
        """The graphs and kernels, each of which takes at least a tenth of a second."""
        return [*self.graphs, *self.kernels]


@contextmanager
def noted(engine: Engine) -> Iterator[Builds]:
    """Note what an engine builds; complete at the end."""
    from triton import knobs

    builds = Builds()
    graphs, blocks = _graphs(engine), _blocks()
    loaded = knobs.runtime.kernel_load_end_hook

    def note(module: object, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        builds.kernels.append(name)

    loaded.add(note)
    try:
        yield builds
    finally:
        loaded.remove(note)
    builds.graphs += [name for name in _graphs(engine) if name not in graphs]
    builds.blocks = _blocks() - blocks


def _graphs(engine: Any) -> list[str]:
    """Name the graphs that an engine holds; only the fast engine has any."""
    prompts = engine._prompts
    return [
        *(f"round of {frame.bucket}" for frame in engine._frames),
        *(f"prompts of {rows} rows, {count} requests" for rows, count in (prompts._graphs if prompts else ())),
    ]


def _blocks() -> int:
    """Count the blocks of memory that this process obtained from the driver, on the GPU and in pinned memory."""
    if not torch.cuda.is_available():
        return 0
    return torch.cuda.memory_stats()["num_device_alloc"] + torch.cuda.host_memory_stats()["num_host_alloc"]
