"""The files that a step of the scheduler and a plan enter are found, and do not become more."""

import round_walk

MOST_FILES = 42
MOST_FILES_OF_A_PLAN = 51


def test_a_round_of_the_reference_enters_few_files():
    found = round_walk.walk("reference")
    assert len(found.files) <= MOST_FILES, sorted(found.files)
    entered = {"specsim/serving/scheduler.py", "reference/engine.py", "reference/verify.py"}
    assert entered <= found.files.keys()
    assert found.crossings["serving", "reference"] >= 1
    assert found.deepest > 5


def test_a_plan_enters_few_files():
    calls = round_walk.walk_command("plan --requests 8 --replicates 1 --accept-rates 0.7,0.5")
    assert len(calls.files) <= MOST_FILES_OF_A_PLAN, sorted(calls.files)
    assert {"specsim/cli/plan.py", "specsim/serving/loop.py", "specsim/simulator/cost.py"} <= calls.files.keys()
