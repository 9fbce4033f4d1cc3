"""The files that a step of the scheduler and a plan enter are found, and do not become more."""

import pytest
import round_walk

MOST_FILES = {"reference": 29, "fast": 41}
MOST_FILES_OF_A_PLAN = 45
GUARD = "specsim/correctness/faults/checks/memory.py"  # of the kernels' addresses, in every test on a CPU


@pytest.mark.parametrize("impl", MOST_FILES)
def test_a_round_enters_few_files(impl):
    calls = round_walk.walk(impl)
    files = calls.files.keys() - {GUARD}
    assert len(files) <= MOST_FILES[impl], sorted(files)
    assert {"specsim/serving/scheduler.py", f"{impl}/engine.py", f"{impl}/verify.py"} <= files
    assert calls.crossings["serving", impl] >= 1
    assert calls.deepest > 5


def test_a_plan_enters_few_files():
    calls = round_walk.walk_command("plan --requests 8 --replicates 1 --accept-rates 0.7,0.5")
    assert len(calls.files) <= MOST_FILES_OF_A_PLAN, sorted(calls.files)
    assert {"specsim/cli/plan.py", "specsim/serving/loop.py", "specsim/simulator/cost.py"} <= calls.files.keys()
