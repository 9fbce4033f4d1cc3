"""Records of drafters: every place that they name exists, and configs and records name each other."""

import inspect
from dataclasses import fields

import pytest

from specsim.core.drafter import DrafterConfig
from specsim.core.kinds import KINDS, OWN, DrafterKind
from specsim.core.verifiers import resolve

RECORDS = [*KINDS.values(), OWN]
PLACES = sorted(
    {
        value
        for kind in RECORDS
        for value in (getattr(kind, each.name) for each in fields(DrafterKind))
        if isinstance(value, str) and value.startswith("specsim.")
    }
)
PARAMETERS = ["drafter", "target", "config", "on"]


@pytest.mark.parametrize("place", PLACES)
def test_the_places_of_records_exist(place: str):
    assert resolve(place) is not None


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.name)
def test_drafters_are_made_with_the_same_parameters(kind: DrafterKind):
    made = [list(inspect.signature(resolve(place)).parameters) for place in (kind.reference, kind.fast)]
    assert made == [PARAMETERS, PARAMETERS]
    assert list(inspect.signature(resolve(kind.oracle)).parameters) == ["request", "tokens", "root", "depth"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_records_name_what_their_kinds_need(kind: DrafterKind):
    needed = ("format", "synthetic") if kind.has_weights else ("settings",)
    assert [name for name in needed if not getattr(kind, name)] == []


def test_a_place_that_a_record_lacks_is_an_error():
    with pytest.raises(ValueError, match="record"):
        resolve("")


def leaves(config: type) -> list[type]:
    """List the config classes that name a kind of their own."""
    below = [leaf for each in config.__subclasses__() for leaf in leaves(each)]
    return [*below, config] if "kind" in vars(config) else below


def test_every_kind_with_weights_has_one_config():
    for kind in KINDS.values():
        resolve(kind.reference)  # imports the file of its config
    # A dataclass with slots is a second class of the same name.
    named = {config.__qualname__: config.kind for config in leaves(DrafterConfig)}
    assert sorted(named.values()) == sorted(kind.name for kind in KINDS.values() if kind.has_weights)
