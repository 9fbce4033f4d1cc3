"""N-gram drafts: examples by hand, transformers' prompt lookup, and both implementations bit for bit."""

import random

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specsim.core.token_drafter import NgramConfig, TreeLimits
from specsim.fast.drafters import ngram as fast
from specsim.reference.drafters import ngram as reference

from .lookup import assert_a_reused_id_starts_over, assert_equal_proposals, chain, digits, paths

NGRAM = {"reference": reference.Ngram, "fast": fast.Ngram}
both = pytest.mark.parametrize("impl", ["reference", "fast"])


@both
@pytest.mark.parametrize(
    ("text", "ngrams", "num_steps", "drafts"),
    [
        ("123423", (2, 3), 4, "423"),  # the example of vLLM's n-gram proposer: three tokens are left
        ("123423", (2, 3), 2, "42"),
        ("123423", (3, 3), 2, ""),  # 423 occurs once
        ("12912812", (1, 3), 1, "9"),  # the earliest of two
        ("9121 812 12", (1, 3), 2, "18"),  # 212 does not occur earlier; 12 does, first before 1 8
        ("5123 4123 6123", (1, 4), 1, "4"),
        ("5123 6123 4123 6123", (1, 4), 1, "4"),  # 6123, not the earlier 123
        ("5123 6123 4123 6123", (1, 3), 1, "6"),
        ("1111", (1, 4), 5, "1"),  # 111 overlaps itself, and one token follows
        ("1111", (1, 2), 5, "11"),
        ("1212", (1, 4), 5, "12"),
        ("7", (1, 4), 3, ""),
        ("77", (1, 4), 3, "7"),
        ("77", (2, 4), 3, ""),
        ("78", (1, 4), 3, ""),
        ("123123", (1, 4), 0, ""),
    ],
)
def test_prompt_lookup_by_hand(text, ngrams, num_steps, drafts, impl):
    proposal = NGRAM[impl](NgramConfig(*ngrams)).propose(0, digits(text), chain(num_steps))
    assert "".join(map(str, proposal.tokens)) == drafts
    assert list(proposal.parents) == list(range(-1, len(drafts) - 1))
    assert list(proposal.scores) == [1.0] * len(drafts)


@both
def test_prompt_lookup_is_transformers(impl):
    """Every continuation equals that of PromptLookupCandidateGenerator, whose shortest n-gram is one token.

    It has no end-of-sequence token here: it would cut the drafts there, where verify stops the request instead.
    """
    rng = random.Random(1)
    lengths = set()
    for case in range(300):
        tokens = [rng.randrange(rng.randint(1, 6)) for _ in range(rng.randint(1, 40))]
        num_steps, most = rng.randint(1, 6), rng.randint(1, 5)
        oracle = PromptLookupCandidateGenerator(
            num_output_tokens=num_steps, max_matching_ngram_size=most, max_length=10**6
        )
        ids, _ = oracle.get_candidates(torch.tensor([tokens]))
        proposal = NGRAM[impl](NgramConfig(1, most)).propose(case, tokens, chain(num_steps))
        assert list(proposal.tokens) == ids[0, len(tokens) :].tolist()
        lengths.add(len(proposal.tokens))
    assert lengths == set(range(7))


# The trie of n-grams.


@both
@pytest.mark.parametrize(
    ("text", "config", "limits", "expected"),
    [
        # 12 is followed by 4 (last) and 3, and 2 by 5 (last), 4 and 3. The longest n-gram has min_breadth children, the
        # shorter one ⌊min_breadth + (2-1)·(3-min_breadth)/2⌋ = 2.
        ("123 124 25 12", NgramConfig(1, 2), TreeLimits(1, 9, 3), "4 5"),
        ("123 124 25 12", NgramConfig(1, 2, min_breadth=2), TreeLimits(1, 9, 3), "4 3 5"),
        ("123 124 25 12", NgramConfig(1, 1, min_breadth=3), TreeLimits(1, 9, 3), "5 4 3"),
        ("123 124 25 12", NgramConfig(2, 2), TreeLimits(1, 9, 3), "4"),
        ("125 126 127 29 12", NgramConfig(1, 2), TreeLimits(1, 9, 3), "7 9"),
        # Breadth falls by (topk - min_breadth) / 2 at each level, here from 2 to 1, and is never below 1.
        ("231 235 247 248 2", NgramConfig(1, 2), TreeLimits(2, 9, 3), "4 3 48 35"),
        ("231 235 247 248 2", NgramConfig(1, 2), TreeLimits(3, 9, 3), "4 3 48 35 482 352"),
        ("231 232 4 2", NgramConfig(1, 1, min_breadth=3), TreeLimits(2, 9, 3), "4 3 42 32 31"),
        # Depth, nodes and siblings are limited, and so is the trie: 2 of its 3 tokens are drafts.
        ("2345 2", NgramConfig(1, 1), TreeLimits(3, 9, 2), "3 34 345"),
        ("2345 2", NgramConfig(1, 1), TreeLimits(2, 9, 2), "3 34"),
        ("2345 2", NgramConfig(1, 1), TreeLimits(3, 1, 2), "3"),
        ("2345 2", NgramConfig(1, 1, trie_depth=3), TreeLimits(3, 9, 2), "3 34"),
        ("2345 2", NgramConfig(1, 1), TreeLimits(0, 9, 2), ""),
        ("2345 2", NgramConfig(1, 1), TreeLimits(3, 0, 2), ""),
        ("123 124 25 12", NgramConfig(1, 2, min_breadth=2), TreeLimits(1, 9, 2), "4 3"),
        # By probability below 12: 3 has 2 of 3, then 9 below 3 has 2/3, 4 has 1/3.
        ("1239 1239 124 12", NgramConfig(2, 2, order="probability"), TreeLimits(2, 9, 2), "3 39 4 41"),
        # Equal counts: the lower token id first; equal probabilities: the one that was found first.
        ("124 123 12", NgramConfig(2, 2, order="probability"), TreeLimits(1, 9, 2), "3 4"),
        ("124 123 12", NgramConfig(2, 2, order="probability"), TreeLimits(2, 9, 2), "3 4 31 41"),
        ("1", NgramConfig(), TreeLimits(3, 9, 2), ""),
        ("12", NgramConfig(), TreeLimits(3, 9, 2), ""),
    ],
)
def test_ngram_tree_by_hand(text, config, limits, expected, impl):
    proposal = NGRAM[impl](config).propose(0, digits(text), limits)
    assert paths(proposal) == expected.split()


@both
def test_ngram_probabilities_are_of_the_kept_children(impl):
    """Below 2 come 3 (3 times), 4 (twice) and 5 (once); two are kept, of 5 occurrences."""
    config = NgramConfig(1, 1, order="probability")
    proposal = NGRAM[impl](config).propose(0, digits("23 23 23 24 24 25 2"), TreeLimits(1, 9, 2))
    assert paths(proposal) == ["3", "4"]
    assert list(proposal.scores) == [3 / 5, 2 / 5]


@both
def test_merged_ngram_path_keeps_its_first_score(impl):
    """Below 12 comes 3 with probability 1; below 2 come 5 with 2/3, and 3, which is merged."""
    config = NgramConfig(1, 2, order="probability")
    proposal = NGRAM[impl](config).propose(0, digits("1234 25 25 12"), TreeLimits(2, 9, 2))
    assert paths(proposal)[:2] == ["3", "34"]
    assert paths(proposal)[2] == "5"
    assert list(proposal.scores)[:3] == [1.0, 1.0, 2 / 3]
    assert all(
        score <= proposal.scores[parent]
        for score, parent in zip(proposal.scores, proposal.parents, strict=True)
        if parent >= 0
    )


@both
def test_ngram_drafts_are_of_the_request_only(impl):
    drafter = NGRAM[impl](NgramConfig())
    assert drafter.propose(0, [1, 2, 1], chain(2)).tokens == [2, 1]
    drafter.finish(0, [1, 2, 1], 1)
    assert drafter.propose(1, [1], chain(2)).tokens == []
    assert drafter.propose(0, [1], chain(2)).tokens == []


@both
def test_reused_request_id_starts_over(impl):
    assert_a_reused_id_starts_over(lambda: NGRAM[impl](NgramConfig()))


def random_config(rng: random.Random) -> NgramConfig:
    least = rng.randint(1, 3)
    most = rng.randint(least, 6)
    order = rng.choice(["recency", "probability"])
    return NgramConfig(least, most, rng.randint(most + 1, most + 6), order, rng.randint(1, 4))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_fast_ngram_drafts_are_the_references(topk, seed):
    assert_equal_proposals(NGRAM, random_config, topk, seed)
