"""Dataclasses that are read back from JSON, field by field."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from specsim import InputError
from specsim.core.json_schema import read_dataclass


@dataclass(frozen=True)
class Inner:
    text: str
    value: Any


@dataclass(frozen=True)
class Outer:
    count: int
    seconds: float
    counts: dict[str, int] = field(default_factory=dict)
    inner: Inner | None = None


RECORD = Outer(3, 0.5, {"draft": 1}, Inner("a", [None]))


@pytest.mark.parametrize("record", [RECORD, Outer(0, 2)])
def test_a_record_survives_json(record):
    assert read_dataclass(Outer, json.loads(json.dumps(asdict(record))), "r") == record


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("r.count", value) for value in (None, "3", 3.0, True, -1, 2**63)),
        *(("r.seconds", value) for value in (None, "x", -0.5, float("nan"), float("inf"), 10**400, [])),
        *(("r.counts", value) for value in (5, None, [])),
        ("r.counts.draft", -1),
        ("r.inner.text", 5),
        ("r.inner", {"text": "a"}),
        ("r.inner", "text"),
    ],
)
def test_a_field_of_another_type_is_named(name, value):
    changed = asdict(RECORD)
    *path, last = name.split(".")[1:]
    target = changed
    for key in path:
        target = target[key]
    target[last] = value
    with pytest.raises(InputError, check=lambda error: error.name == name):
        read_dataclass(Outer, changed, "r")


@pytest.mark.parametrize("value", [None, [], {}, asdict(RECORD) | {"more": 1}, {"count": 3}])
def test_missing_and_unknown_fields_are_refused(value):
    with pytest.raises(InputError, check=lambda error: error.name == "r"):
        read_dataclass(Outer, value, "r")
