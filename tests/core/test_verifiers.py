"""Records of verifiers: their names are those of the type, and what they name exists."""

from dataclasses import fields
from typing import get_args

import pytest

from specsim.core.config import SpecConfig
from specsim.core.verifiers import DRAFTS, KIND_OF, VERIFIER_KINDS, VERIFIER_OF, VERIFIERS, Verifier, one_of, resolve


def test_the_names_of_the_type_are_those_of_the_records():
    assert get_args(Verifier) == VERIFIERS == tuple(KIND_OF)
    assert set(VERIFIER_OF) == set(DRAFTS)


@pytest.mark.parametrize("place", sorted({place for kind in VERIFIER_KINDS for place in kind.places}))
def test_every_place_of_a_record_exists(place):
    assert resolve(place) is not None


@pytest.mark.parametrize("kind", VERIFIER_KINDS, ids=lambda kind: kind.name)
def test_thresholds_are_fields_and_drafts_have_a_distribution(kind):
    assert set(kind.thresholds) <= {field.name for field in fields(SpecConfig)}
    assert kind.drafts != "best" or not kind.reads_draft_prob
    assert kind.is_lossless or kind.thresholds


def test_names_are_listed_in_words():
    assert one_of(VERIFIER_KINDS[:1]) == VERIFIERS[0]
    assert one_of(VERIFIER_KINDS[:3]) == f"{VERIFIERS[0]}, {VERIFIERS[1]} or {VERIFIERS[2]}"
