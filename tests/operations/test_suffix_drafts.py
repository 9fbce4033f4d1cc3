"""Suffix drafts: examples by hand, and both implementations bit for bit."""

import random

import pytest

from specsim.core.token_drafter import SuffixConfig, TreeLimits
from specsim.fast.drafters import suffix as fast
from specsim.reference.drafters import suffix as reference

from .lookup import assert_a_reused_id_starts_over, assert_equal_proposals, chain, digits, paths

SUFFIX = {"reference": reference.Suffix, "fast": fast.Suffix}
both = pytest.mark.parametrize("impl", ["reference", "fast"])


@both
@pytest.mark.parametrize(
    ("text", "config", "limits", "expected"),
    [
        # One token matches in any case, so one draft: 1 occurs 3 times and 2 follows twice.
        ("12121", SuffixConfig(max_depth=2), chain(4), "2"),
        # 2 3 occurs twice and 1 follows once; with m = 2 two drafts are allowed, 0.5 each, and the sum is higher.
        ("123123", SuffixConfig(), chain(4), "1 12 123"),
        ("123123", SuffixConfig(max_depth=3), chain(4), "1"),  # paths end at three tokens, so the longest m is 2
        ("123123", SuffixConfig(factor=0.5), chain(4), "1"),
        ("123123", SuffixConfig(factor=0), chain(4), ""),
        ("123123", SuffixConfig(factor=0, offset=2.5), chain(4), "1 12"),
        ("123123", SuffixConfig(offset=-2), chain(4), "1"),
        ("123123", SuffixConfig(offset=-3), chain(4), ""),
        ("123123", SuffixConfig(), chain(2), "1 12"),
        ("123123", SuffixConfig(), TreeLimits(3, 2, 1), "1 12"),
        ("123123", SuffixConfig(min_prob=0.5), chain(4), "1 12 123"),
        ("123123", SuffixConfig(min_prob=0.51), chain(4), ""),
        # 1 occurs 5 times: 2 follows twice, and so does 3. Of equal counts the lower token id is followed.
        ("13 12 13 12 1", SuffixConfig(max_depth=2), chain(1), "2"),
        ("13 12 13 12 1", SuffixConfig(max_depth=2, factor=2), TreeLimits(1, 9, 2), "2 3"),
        ("13 12 13 12 1", SuffixConfig(max_depth=2, factor=2), TreeLimits(1, 9, 1), "2"),
        ("13 12 13 12 1", SuffixConfig(max_depth=2, factor=2, min_prob=0.45), TreeLimits(1, 9, 2), ""),
        ("1", SuffixConfig(), chain(4), ""),
        ("11", SuffixConfig(), chain(4), "1"),
        ("12", SuffixConfig(), chain(4), ""),
    ],
)
def test_suffix_drafts_by_hand(text, config, limits, expected, impl):
    proposal = SUFFIX[impl](config).propose(0, digits(text), limits)
    assert paths(proposal) == expected.split()


@both
def test_suffix_scores_are_products_of_relative_counts(impl):
    """1 occurs 4 times, the last one at the end: 2 follows 3 times, then 5 twice and 6 once."""
    proposal = SUFFIX[impl](SuffixConfig(max_depth=3, factor=5)).propose(
        0, digits("125 125 126 1"), TreeLimits(2, 9, 2)
    )
    assert paths(proposal) == ["2", "25", "26"]
    assert list(proposal.scores) == [3 / 4, 3 / 4 * (2 / 3), 3 / 4 * (1 / 3)]


@both
def test_longest_match_wins_among_equal_sums(impl):
    one = SUFFIX[impl](SuffixConfig(factor=0, offset=1))
    # 7 and 5 7 are followed by 1 and by 2, with 1/3 each; 8 5 7 is followed by 2 with 1/2.
    assert paths(one.propose(0, digits("9571 8572 857"), chain(1))) == ["2"]
    # 1 2 is followed by 3 in one of two cases; 2 by 4 in two of four.
    assert paths(one.propose(1, digits("24 24 123 12"), chain(1))) == ["3"]


def finished(impl: str, config: SuffixConfig, *outputs: str) -> reference.Suffix | fast.Suffix:
    drafter = SUFFIX[impl](config)
    for request_id, output in enumerate(outputs):
        drafter.finish(request_id, [9, *digits(output)], 1)
    return drafter


@both
def test_finished_outputs_are_shared(impl):
    drafter = finished(impl, SuffixConfig(), "123", "124", "124")
    assert paths(drafter.propose(7, digits("12"), chain(1))) == ["4"]
    assert paths(drafter.propose(7, digits("9"), chain(1))) == []  # the prompt is not shared
    assert paths(drafter.propose(7, digits("41"), chain(1))) == ["2"]  # only 1 matches: outputs are not one text
    alone = finished(impl, SuffixConfig(shared=False), "123")
    assert paths(alone.propose(7, digits("12"), chain(1))) == []


@both
def test_own_tokens_win_against_an_equal_output(impl):
    """Its own 3 and the output's 4 both have 1/2; a second output raises 4 to 2/3."""
    drafter = finished(impl, SuffixConfig(), "124 12")
    assert paths(drafter.propose(7, digits("123 12"), chain(1))) == ["3"]
    drafter.finish(8, digits("12 124"), 2)
    assert paths(drafter.propose(7, digits("123 12"), chain(1))) == ["4"]


@both
def test_oldest_output_leaves_first(impl):
    config = SuffixConfig(max_cached_requests=2)
    drafter = finished(impl, config, "12", "34", "56")
    assert paths(drafter.propose(7, [5], chain(1))) == []  # a match is shorter than the request's tokens
    asked = [paths(drafter.propose(7, [8, token], chain(1))) for token in (1, 3, 5)]
    assert asked == [[], ["4"], ["6"]]
    drafter.finish(1, digits("9 78"), 1)  # replaces 34 and is the newest
    drafter.finish(3, digits("9 9"), 2)  # an empty output takes a place, so 56 leaves
    asked = [paths(drafter.propose(7, [8, token], chain(1))) for token in (3, 5, 7)]
    assert asked == [[], [], ["8"]]


@both
def test_reused_request_id_starts_over(impl):
    assert_a_reused_id_starts_over(lambda: SUFFIX[impl](SuffixConfig()))


def random_config(rng: random.Random) -> SuffixConfig:
    return SuffixConfig(
        max_depth=rng.randint(2, 8),
        factor=rng.choice([0.5, 0.7, 1.0, 2.0]),
        offset=rng.choice([-1, 0, 0.5, 3]),
        min_prob=rng.choice([0, 0.05, 0.1, 0.3]),
        shared=rng.random() < 0.7,
        max_cached_requests=rng.randint(1, 3),
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_fast_suffix_drafts_are_the_references(topk, seed):
    assert_equal_proposals(SUFFIX, random_config, topk, seed)
