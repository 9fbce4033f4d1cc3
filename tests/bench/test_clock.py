"""Timed parts run without collections of garbage."""

import gc

import pytest

from specsim.bench.clock import interleaved_times, without_collection


def test_no_garbage_is_collected_while_a_part_is_timed():
    seen = []
    interleaved_times({"call": lambda: seen.append(gc.isenabled())}, samples=2)
    assert seen == [False, False]
    assert gc.isenabled()


def test_garbage_is_collected_again_after_an_error():
    with pytest.raises(KeyError), without_collection():
        raise KeyError
    assert gc.isenabled()
