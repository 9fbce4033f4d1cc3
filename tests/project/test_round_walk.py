"""The files that a step of the scheduler enters are found, and do not become more."""

import round_walk

MOST_FILES = 42


def test_a_round_of_the_reference_enters_few_files():
    found = round_walk.walk("reference")
    assert len(found.files) <= MOST_FILES, sorted(found.files)
    entered = {"specsim/serving/scheduler.py", "reference/engine.py", "reference/verify.py"}
    assert entered <= found.files.keys()
    assert found.crossings["serving", "reference"] >= 1
    assert found.deepest > 5
