"""Replaying recorded candidates: by hand, the recorded setting and smaller ones."""

import numpy as np
import pytest

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import walk
from specsim.simulator.replay import RecordedCandidates

# One position, topk 2, two steps: root children 5 (0.6) and 7 (0.3); 5's children 1 (0.5), 2 (0.1); 7's 3, 4.
SCORES = np.array([[0.6, 0.3, 0.5, 0.1, 0.29, 0.01]], dtype=np.float32)
TOKENS = np.array([[5, 7, 1, 2, 3, 4]])
PARENTS = np.array([[-1, 0, 1]])


def recorded(following: tuple[int, int]) -> RecordedCandidates:
    return RecordedCandidates(TOKENS, SCORES, PARENTS, (np.array([9, *following]),), 2, 2)


@pytest.mark.parametrize(
    ("following", "accepted"),
    [((5, 1), {2: 1, 3: 2, 4: 2, 5: 2}), ((7, 3), {2: 0, 3: 0, 4: 1, 5: 2}), ((5, 2), {2: 1, 5: 1}), ((8, 1), {5: 0})],
)
def test_by_hand(following, accepted):
    trace = recorded(following)
    for num_draft_tokens, expected in accepted.items():
        assert trace.accepted(SpecConfig(2, 2, num_draft_tokens)).tolist() == [expected]


def test_chain_by_hand():
    assert recorded((5, 1)).accepted(SpecConfig(1, 2, 3)).tolist() == [2]
    assert recorded((7, 3)).accepted(SpecConfig(1, 2, 3)).tolist() == [0]
    assert recorded((5, 1)).accepted(SpecConfig(1, 1, 2)).tolist() == [1]


def test_shares_by_hand():
    assert recorded((5, 2)).shares().tolist() == [[1, 0], [0, 1]]
    assert recorded((8, 2)).shares().tolist() == [[0, 0], [0, 0]]


def test_a_lane_that_was_not_recorded_ends_there():
    """At step 2 the recorded lanes are candidates 3 and 4, and the best, candidate 2, was not expanded."""
    scores = np.array([[0.6, 0.5, 0.55, 0.54, 0.2, 0.1, 0.5, 0.01, 0.2, 0.1]], dtype=np.float32)
    tokens = np.array([[5, 7, 1, 2, 3, 4, 6, 8, 10, 11]])
    parents = np.array([[-1, 0, 1, 3, 4]])
    for following, accepted in (((5, 1, 6), 2), ((5, 2, 6), 3), ((7, 3, 10), 1)):
        trace = RecordedCandidates(tokens, scores, parents, (np.array([9, *following]),), 2, 3)
        assert trace.accepted(SpecConfig(2, 3, 6)).tolist() == [accepted]
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("topk", 3)):
        trace.accepted(SpecConfig(3, 2, 4))


def test_rows_must_fit():
    with pytest.raises(InputError, check=lambda error: error.name == "tokens"):
        RecordedCandidates(TOKENS, SCORES, PARENTS, (np.array([9, 1]),), 2, 2)


def test_acceptance_is_split_by_request():
    two = RecordedCandidates(
        np.repeat(TOKENS, 3, 0),
        np.repeat(SCORES, 3, 0),
        np.repeat(PARENTS, 3, 0),
        (np.array([9, 5, 1]), np.array([9, 5, 1, 2])),
        2,
        2,
    )
    counts = two.acceptance(SpecConfig(2, 2, 4)).counts
    assert [each.tolist() for each in counts] == [[2], [2, 0]]
    assert walk(counts[1]).tolist() == [2]
