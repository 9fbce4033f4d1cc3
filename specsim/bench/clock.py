"""GPU times, by graphs of many launches over uncached inputs, and measured peaks of the device."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from specsim.bench.roofline import Peaks
from specsim.bench.row import Timing

LEAST_LAUNCHES = 32  # of one graph, so that a replay is much longer than the overhead of an event
MOST_COPIES = 64
SAMPLES = 15  # of a measured peak
_NUMBERS = 2**30  # of four bytes


def timing(samples_us: list[float]) -> Timing:
    """Compute median and spread of samples."""
    median = statistics.median(samples_us)
    if len(samples_us) < 4:
        return Timing(median, 100 * (max(samples_us) - min(samples_us)) / median, len(samples_us))
    low, _, high = statistics.quantiles(samples_us, n=4)
    return Timing(median, 100 * (high - low) / median, len(samples_us))


def copies_of(input_bytes: int) -> int:
    """Count the inputs that an operation needs in turn so that the L2 cache holds none of them."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MOST_COPIES, -(-4 * cache // max(1, input_bytes))))


def replayed(replay: Callable[[], object], samples: int, parts: int = 1) -> Timing:
    """Time replays by events; parts: number of equal parts of a replay, the time of one is returned."""
    for _ in range(2):
        replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(samples)]
    for start, end in events:
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return timing([1e3 * start.elapsed_time(end) / parts for start, end in events])


def launched(run: Callable[[int], Any], copies: int, samples: int, least: int = LEAST_LAUNCHES) -> Timing:
    """Time one `run(i)` in a graph of at least `least` launches, i taking all values in turn."""
    from specsim.fast.runtime.graph import capture

    repeats = -(-least // copies)

    def work() -> None:
        for _ in range(repeats):
            for index in range(copies):
                run(index)

    graph = capture(work, torch.device("cuda"))
    return replayed(graph.replay, samples, repeats * copies)


def walled(run: Callable[[], Any], samples: int, parts: int) -> Timing:
    """Measure the wall-clock time of a call until the device is done.

    parts: number of equal parts of the call; the time of one is returned.
    """
    return interleaved_times({"": run}, samples, parts)[""]


def interleaved_times(runs: Mapping[str, Callable[[], Any]], samples: int, parts: int = 1) -> dict[str, Timing]:
    """Measure wall-clock times of several calls, one sample of each in turn, so that host noise affects all alike.

    parts: number of equal parts of a call; the time of one is returned.
    """
    samples_by_name: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(samples):
        for name, run in runs.items():
            with without_collection():
                wait()
                start = time.perf_counter()
                run()
                wait()
                samples_by_name[name].append(1e6 * (time.perf_counter() - start) / parts)
    return {name: timing(times) for name, times in samples_by_name.items()}


@contextmanager
def without_collection() -> Iterator[None]:
    """Collect garbage first, and none inside: a full collection takes 0.1 s in a process with torch."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def wait() -> None:
    """Wait until the GPU is done, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_peaks() -> Peaks:
    """Measure the peaks of some plain kernels: a sum over memory, a copy, a product of two random matrices.

    Of four gigabytes the L2 cache keeps less than a fiftieth between passes.
    """
    numbers = torch.randint(-(2**31), 2**31 - 1, (_NUMBERS,), dtype=torch.int32, device="cuda")
    read = _read_rate(numbers)
    copy = torch.empty_like(numbers)
    copied = launched(lambda _: torch.neg(numbers, out=copy), 1, SAMPLES, 2)  # a kernel; copy_ may be none
    size = 8192
    first, second = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = replayed(lambda: torch.mm(first, second), SAMPLES)
    dense = 2e6 * size**3 / product.median_us
    return Peaks(read=read, copy=2e6 * numbers.nbytes / copied.median_us, dense=dense)


def _read_rate(numbers: torch.Tensor) -> float:
    from specsim.bench.bandwidth import TILINGS, partial_sums

    expected = numbers.sum()
    times: list[float] = []
    for tiling in TILINGS:
        total = partial_sums(numbers, tiling).sum()
        if (total - expected) % 2**32:
            raise ArithmeticError("the sum over memory that measures read bandwidth is wrong")
        times.append(launched(lambda _, tiling=tiling: partial_sums(numbers, tiling), 1, SAMPLES, 2).median_us)
    return 1e6 * numbers.nbytes / min(times)


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
    union, duration = covered(_spans(run))
    return union / duration


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
