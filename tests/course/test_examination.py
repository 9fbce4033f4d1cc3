"""Examination of copies of the package: a fault shows in its output and in its first wrong field."""

import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.course import examination
from specsim.course.examination import examine

SETTING = {"tree": dict(kind="eagle3", topk=2, num_steps=3, num_draft_tokens=6, page_size=4, batch=2, rounds=1)}
CONFIG = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6)


def test_a_fault_is_seen_from_outside_and_inside():
    right, wrong = examine([None, "kv-not-moved"], "class Stack:", CONFIG, SETTING)
    assert right.answer.tokens[:5] == wrong.answer.tokens[:5]
    assert right.answer.tokens != wrong.answer.tokens
    assert right.text != wrong.text
    assert right.accept_length == 3
    assert right.differences["tree"].first is None
    assert right.differences["tree"].inside == ()
    difference = wrong.differences["tree"]
    assert difference.first is not None
    assert (difference.first.round, difference.first.phase, difference.first.field) == (1, "verify", "target keys")
    assert [each.field for each in difference.inside] == ["target keys"]


def test_an_unknown_fault_is_refused():
    with pytest.raises(InputError, match="names"):
        examine(["kv-moved"], "class Stack:", CONFIG, SETTING)


def test_a_copy_that_crashes_is_an_error(monkeypatch):
    monkeypatch.setattr(examination, "changed", lambda _: {"specsim.core.config": "1 / 0\n"})
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        examine(["kv-not-moved"], "class Stack:", CONFIG, SETTING)
