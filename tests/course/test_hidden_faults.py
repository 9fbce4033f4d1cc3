"""Numbered faults of the course: entries of the catalogue, among the suspects, and never named to the reader."""

import re
from pathlib import Path

import pytest

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.correctness.faults.catalogue import FAULTS
from specsim.course import examination, exercise, hidden_faults
from specsim.course.hidden_faults import NUMBERED, PLACES, SUSPECTS, WOULD_SHOW, compared

BY_NAME = {fault.name: fault for fault in FAULTS}
NOTEBOOK = Path(__file__).parents[2] / "notebooks/10_find_the_fault.ipynb"


def test_numbered_faults_are_suspects_without_their_names():
    assert set(NUMBERED.values()) <= set(SUSPECTS.values()) <= set(BY_NAME)
    assert WOULD_SHOW.keys() == SUSPECTS.keys()
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert "hidden_faults.suspects()" in text
    for number, name in NUMBERED.items():
        assert PLACES[number][1] == BY_NAME[name].fields
        assert not re.search(rf"{name}\b", text)


def test_suspects_are_shown_by_their_causes():
    suspects = hidden_faults.suspects()
    assert repr(suspects).splitlines() == [f"{letter}  {BY_NAME[name].cause}" for letter, name in SUSPECTS.items()]
    assert all(f"<b>{letter}</b>" in suspects._repr_html_() for letter in SUSPECTS)


def test_numbers_stand_for_names(monkeypatch):
    monkeypatch.setattr(examination, "examine", lambda names, *_: names)
    names = hidden_faults.examine([None, "bonus-stride", 2], "x", SpecConfig(), {})
    assert names == {None: None, "bonus-stride": "bonus-stride", 2: "kv-not-moved"}
    with pytest.raises(InputError, match="faults"):
        hidden_faults.examine([4], "x", SpecConfig(), {})


def test_a_diagnosis_is_compared_part_by_part():
    assert set(compared(exercise("10-2").solution, 1).values()) == {"right"}
    assert set(compared(lambda _: ("draft-extend", "Draft values", "e"), 1).values()) == {"right"}
    wrong = compared(lambda _: ("verify", "logprobs", "A"), 1)
    assert wrong["the phase"] == wrong["the field"] == "wrong"
    assert WOULD_SHOW["A"] in wrong["the cause"]
    assert "no letter" in compared(lambda _: ("verify", "logprobs", "Z"), 1)["the cause"]
