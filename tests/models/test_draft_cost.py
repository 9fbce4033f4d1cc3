"""Cost of a draft: weights that are read, counted by hand for the shipped drafters."""

import pytest

import specsim
from specsim.models.draft_cost import draft_cost
from specsim.models.synthetic_pair import synthetic_pair

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


def test_a_cut_head_is_read_whole_by_each_module():
    whole, cut = (draft_cost(specsim.load(drafter="mtp", draft_vocab=ids)) for ids in (None, range(1024)))
    assert whole - cut == pytest.approx((VOCAB - 1024) * HIDDEN / TARGET)


@pytest.mark.parametrize("kind", ["p-eagle", "dflash", "dspark"])
def test_drafts_of_one_forward_share_its_weights(kind):
    pair = synthetic_pair(kind)
    sizes = {name: tensor.numel() for name, tensor in pair.drafter.tensors.items()}
    target = sum(tensor.numel() for name, tensor in pair.target.tensors.items() if "embed_tokens" not in name)
    each = sum(size for name, size in sizes.items() if "markov_w2" in name or "confidence" in name)
    tables = ("markov_head.markov_w1.weight", "embed_tokens.weight", "d2t", "t2d")
    shared = sum(size for name, size in sizes.items() if name not in tables) - each
    shared += 0 if "lm_head.weight" in sizes else pair.target.tensors["lm_head.weight"].numel()
    assert (each > 0) is (kind == "dspark")
    for steps in (1, 4):
        assert draft_cost(pair, steps) == pytest.approx((shared / steps + each) / target)
    assert draft_cost(specsim.load(drafter="eagle3"), 4) == draft_cost(specsim.load(drafter="eagle3"))
