"""The persistent kernel repeats the schedule's constants and reads only what a schedule has."""

import re
from pathlib import Path

import pytest

from specsim.fast.persistent import kernel, memory, schedule
from specsim.fast.runtime.gluon import Constants


@pytest.mark.parametrize("name", ["SUMS", "STRIDE", "WAKES", "COLUMNS", "FLIGHT"])
def test_constants_are_the_schedules(name):
    assert getattr(memory, name).value == getattr(schedule, name)


def test_the_kernel_reads_what_a_schedule_has():
    files = Path(kernel.__file__).parent.glob("*.py")
    read = {name for file in files for name in re.findall(r"\bS\.(\w+)", file.read_text())}
    made = schedule.ForwardSchedule(hidden=64, inner=192, heads=4, kv_heads=2, layers=3, requests=1, nodes=2)
    constants = Constants(made)
    for name in read:
        assert getattr(constants, name).value == getattr(made, name)
    assert len(read) > 20


def test_a_stage_has_the_size_that_its_barrier_expects():
    assert schedule.STAGE_BYTES == 32768 == schedule.COLUMNS * schedule.HEAD_DIM * 2 * 2
