"""Share of time in which the GPU runs something, from the kernels and copies that torch's profiler records."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

METHOD = (
    "GPU busy: union of the kernels' and copies' times over the time from the first to the last one's end, profiled"
)


def covered(spans: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Measure (length of the union of spans, length from the first start to the last end)."""
    union = 0
    ordered = sorted(spans)
    reached = begin = ordered[0][0] if ordered else 0
    for start, end in ordered:
        union += max(0, end - max(start, reached))
        reached = max(reached, end)
    return union, reached - begin


def busy_share(run: Callable[[], object]) -> float:
    """Profile a call, and compute the share of its time on the GPU in which the GPU is busy.

    It runs twice: the first profile of a process starts slowly, and graphs launch slowly in their first profile.
    """
    _spans(run)
    union, whole = covered(_spans(run))
    return union / whole


def _spans(run: Callable[[], object]) -> list[tuple[int, int]]:
    """List start and end, in nanoseconds, of everything that a call runs on the idle GPU."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()  # what still ran would begin the profile, long before the call does
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        run()
        torch.cuda.synchronize()
    return list(_device_spans(profiler))


def _device_spans(profiler: Any) -> Iterator[tuple[int, int]]:
    """List start and end, in nanoseconds, of everything that ran on the GPU."""
    for event in profiler.profiler.kineto_results.events():
        if event.device_type().name == "CUDA":
            yield event.start_ns(), event.start_ns() + event.duration_ns()
