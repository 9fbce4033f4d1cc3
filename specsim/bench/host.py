"""Host side of a round: its time, its launches, and a check that it never waits for the device."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from specsim.bench.checks import all_of
from specsim.bench.clock import timing
from specsim.bench.row import OURS, Check, Row, Target, Timing
from specsim.bench.scene import Scene

CONSECUTIVE = 8  # rounds, each enqueued before the last one has ended
SAMPLES = 15
MOST_HOST_US = 100.0


def host_row(name: str, setting: Mapping[str, Any], scene: Scene, round_check: Check) -> Row:
    """Time the host on a checked round until all is enqueued, and check that it never waits."""
    check = all_of("the round's own check, and that the host never waits", round_check, _without_waiting(scene))
    timings = {}
    targets = ()
    notes = ()
    if check.passed:
        timings[OURS], first = host_times(scene)
        targets = (Target("host time, us", timings[OURS].median_us, MOST_HOST_US),)
        notes = (f"{first:.0f} us after an idle device",)
    return Row(name, setting, {OURS: check}, timings, targets=targets, notes=notes)


def _without_waiting(scene: Scene) -> Check:
    """Check CONSECUTIVE rounds under torch's sync debug mode, which raises where the host would wait."""
    compared = f"no synchronisation in {CONSECUTIVE} consecutive rounds (torch's sync debug mode)"
    scene.rounds(CONSECUTIVE)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        scene.rounds(CONSECUTIVE)
    except RuntimeError as error:
        return Check(compared, 1, 0, str(error).strip().splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return Check(compared, 0, 0)


def host_times(scene: Scene) -> tuple[Timing, float]:
    """Measure the wall-clock time until a round is enqueued: of later rounds, and of the first.

    The first follows an idle device.
    """
    first = []
    others = []
    for _ in range(SAMPLES):
        torch.cuda.synchronize()
        before = time.perf_counter()
        for place, _ in enumerate(scene.following(CONSECUTIVE)):
            now = time.perf_counter()
            (others if place else first).append(1e6 * (now - before))
            before = now
    torch.cuda.synchronize()
    return timing(others), timing(first).median_us


def launches(scene: Scene) -> tuple[float, float]:
    """Count (graph launches, other launches and copies) a round by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        scene.rounds(CONSECUTIVE)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profiler.key_averages()}
    graphs = sum(count for key, count in counts.items() if key.startswith(("cudaGraphLaunch", "cuGraphLaunch")))
    kinds = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpy", "cudaMemset")
    others = sum(count for key, count in counts.items() if key.startswith(kinds))
    return graphs / CONSECUTIVE, others / CONSECUTIVE
