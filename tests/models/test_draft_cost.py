"""Cost of a draft: weights that are read, counted by hand for the shipped drafters."""

import pytest

import specsim
from specsim.models.draft_cost import draft_cost

HIDDEN, VOCAB, MLP, KV = 256, 4096, 768, 128
HEAD = VOCAB * HIDDEN
ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV
LAYER = ATTENTION + 3 * HIDDEN * MLP + 2 * HIDDEN  # with both norms
TARGET = 4 * LAYER + HIDDEN + HEAD


@pytest.mark.parametrize(
    ("drafter", "weights"),
    [
        ("standalone", 2 * LAYER + HIDDEN + HEAD),
        ("mtp", ATTENTION + 3 * HIDDEN * 1024 + 2 * HIDDEN * HIDDEN + 5 * HIDDEN + HEAD),
        ("eagle", ATTENTION + 3 * HIDDEN * 1280 + 2 * HIDDEN * HIDDEN + 2 * HIDDEN + HEAD),
        ("ngram", 0),
        ("none", 0),
    ],
)
def test_weights_of_a_draft_are_counted(drafter, weights):
    assert draft_cost(specsim.load(drafter=drafter)) == weights / TARGET


def test_a_smaller_draft_vocabulary_is_cheaper():
    own = draft_cost(specsim.load(drafter="eagle3"))
    layer = ATTENTION + HIDDEN * (HIDDEN + 2 * KV) + 3 * HIDDEN * 1280 + 3 * HIDDEN * HIDDEN + 4 * HIDDEN
    assert own == (layer + 3584 * HIDDEN) / TARGET
