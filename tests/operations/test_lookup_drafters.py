"""N-gram and suffix drafters: examples by hand, transformers' prompt lookup, and both implementations bit for bit."""

import random
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from specsim.core.token_drafter import NgramConfig, Proposal, SuffixConfig, TreeLimits
from specsim.fast.drafters import ngram as fast_ngram
from specsim.fast.drafters import suffix as fast_suffix
from specsim.fast.drafters.counted_trie import CountedTrie
from specsim.reference.drafters import ngram as reference_ngram
from specsim.reference.drafters import suffix as reference_suffix
from specsim.reference.drafters.occurrences import followers, occurrences

NGRAM = {"reference": reference_ngram.Ngram, "fast": fast_ngram.Ngram}
SUFFIX = {"reference": reference_suffix.Suffix, "fast": fast_suffix.Suffix}
both = pytest.mark.parametrize("impl", ["reference", "fast"])


def chain(num_steps: int) -> TreeLimits:
    return TreeLimits(num_steps, num_steps, 1)


def paths(proposal: Proposal) -> list[str]:
    """Write each candidate as its path of tokens, which are below 10."""
    written = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        written.append(f"{written[parent] if parent >= 0 else ''}{token}")
    return written


def digits(text: str) -> list[int]:
    return [int(digit) for digit in text if digit != " "]


# Prompt lookup.


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


# Suffix decoding.


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


def finished(impl: str, config: SuffixConfig, *outputs: str) -> reference_suffix.Suffix | fast_suffix.Suffix:
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
@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_reused_request_id_starts_over(kind, impl):
    make = {"ngram": lambda: NGRAM[impl](NgramConfig()), "suffix": lambda: SUFFIX[impl](SuffixConfig())}[kind]
    for limits in (chain(3), TreeLimits(3, 7, 2)):
        drafter = make()
        for text in ("1231", "12314", "4561", "1", "11", "4561456"):
            proposal = drafter.propose(0, tuple(digits(text)), limits)
            assert proposal == make().propose(0, digits(text), limits)
        assert proposal.tokens


# Both implementations.


def streams(rng: random.Random) -> Iterator[tuple[int, list[int]]]:
    """Grow several requests in turn by new tokens, repetitions of their beginning, and periods."""
    vocab_size = rng.randint(1, 5)
    texts: dict[int, list[int]] = {}
    for _ in range(30):
        request_id = rng.randrange(5)
        if request_id not in texts or rng.random() < 0.05:
            texts[request_id] = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        text = texts[request_id]
        text += rng.choice(
            [
                text[: rng.randint(0, 5)],
                text[-rng.randint(1, 3) :] * 2,
                [rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))],
            ]
        )
        yield request_id, text


def ngram_config(rng: random.Random) -> NgramConfig:
    least = rng.randint(1, 3)
    most = rng.randint(least, 6)
    order = rng.choice(["recency", "probability"])
    return NgramConfig(least, most, rng.randint(most + 1, most + 6), order, rng.randint(1, 4))


def suffix_config(rng: random.Random) -> SuffixConfig:
    return SuffixConfig(
        max_depth=rng.randint(2, 8),
        factor=rng.choice([0.5, 0.7, 1.0, 2.0]),
        offset=rng.choice([-1, 0, 0.5, 3]),
        min_prob=rng.choice([0, 0.05, 0.1, 0.3]),
        shared=rng.random() < 0.7,
        max_cached_requests=rng.randint(1, 3),
    )


def assert_within(proposal: Proposal, limits: TreeLimits) -> None:
    """Check the protocol: parents come first, siblings differ, scores fall, and the limits hold."""
    depths = []
    for index, parent in enumerate(proposal.parents):
        assert -1 <= parent < index
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
        assert parent < 0 or proposal.scores[index] <= proposal.scores[parent]
    edges = list(zip(proposal.parents, proposal.tokens, strict=True))
    assert len(set(edges)) == len(edges) == len(proposal.scores) <= limits.max_nodes
    assert max(depths, default=0) <= limits.max_depth
    assert max((proposal.parents.count(parent) for parent in proposal.parents), default=0) <= limits.topk


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("topk", [1, 2, 3])
@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_fast_proposes_what_the_reference_does(kind, topk, seed):
    """Proposals are equal, scores bit for bit, while requests interleave, end and reuse ids."""
    rng = random.Random(f"{kind} {topk} {seed}")
    num_drafts = 0
    for _ in range(10):
        drafters = [
            make(config)
            for config in [ngram_config(rng) if kind == "ngram" else suffix_config(rng)]
            for make in (NGRAM if kind == "ngram" else SUFFIX).values()
        ]
        for request_id, text in streams(rng):
            num_steps = rng.randint(0, 6)
            limits = chain(num_steps) if topk == 1 else TreeLimits(num_steps, rng.randint(0, 12), topk)
            expected, proposal = (drafter.propose(request_id, text, limits) for drafter in drafters)
            assert proposal == expected
            assert_within(proposal, limits)
            num_drafts += len(proposal.tokens)
            if rng.random() < 0.15:
                prompt_len = rng.randint(0, len(text))
                for drafter in drafters:
                    drafter.finish(request_id, text, prompt_len)
    assert num_drafts > 300


# The trie of the fast implementation.


def assert_counts(trie: CountedTrie, texts: list[list[int]], depth: int, vocab_size: int) -> None:
    for length in range(1, depth + 1):
        for path in product(range(vocab_size), repeat=length):
            count = sum(len(occurrences(text, path)) for text in texts)
            found = trie.find(path)
            assert (found is not None) == (count > 0)
            if found is None:
                continue
            behind = [followers(text, path) for text in texts] if length < depth else []
            expected = {token: sum(len(each.get(token, ())) for each in behind) for each in behind for token in each}
            assert found.node.count == count
            assert {each.token: each.occurrences for each in trie.followers(found)} == expected


@pytest.mark.parametrize("seed", range(3))
def test_trie_counts_every_path(seed):
    """Counts equal those of a search, after every token and after every removal."""
    rng = random.Random(seed)
    depth = rng.randint(2, 4)
    trie = CountedTrie(depth)
    texts: list[list[int]] = []
    for _ in range(6):
        texts.append(trie.text)
        for _ in range(rng.randint(0, 9)):
            trie.append(rng.randrange(2))
            assert_counts(trie, texts, depth, 2)
        trie.open()
        if len(texts) == 3:
            trie.remove(texts.pop(rng.randrange(3)))
            assert_counts(trie, texts, depth, 2)
    while texts:
        trie.remove(texts.pop())
    assert not any(True for token in range(2) if trie.find([token]))


def test_trie_of_a_text_without_repetitions_is_small(monkeypatch):
    """A path that occurs once takes one node."""
    made = []
    from specsim.fast.drafters import counted_trie

    node = counted_trie.Node
    monkeypatch.setattr(counted_trie, "Node", lambda *args: made.append(args) or node(*args))
    trie = CountedTrie(24)
    for token in range(200):
        trie.append(token)
    assert len(made) == 1 + 200
