"""The trie of paths: counts and last occurrences equal a search, while texts grow and leave."""

import random
from itertools import product

import pytest

from specsim.fast.drafters import counted_trie
from specsim.fast.drafters.counted_trie import CountedTrie
from specsim.reference.drafters.occurrences import followers, occurrences


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


@pytest.mark.parametrize("vocab_size", [1, 2, 4])
def test_trie_knows_suffixes_and_last_occurrences(vocab_size):
    rng = random.Random(vocab_size)
    depth = 4
    trie = CountedTrie(depth)
    for size in range(1, 25):
        trie.append(rng.randrange(vocab_size))
        for start in range(max(0, size - depth), size):
            assert trie.suffix(size - start) == trie.find(trie.text[start:])
        for path in product(range(vocab_size), repeat=rng.randint(1, depth - 1)):
            expected = {token: starts[-1] for token, starts in followers(trie.text, path).items()}
            found = trie.find(path)
            assert {each.token: each.start for each in (trie.followers(found) if found else ())} == expected


def test_trie_of_a_text_without_repetitions_is_small(monkeypatch):
    """A path that occurs once takes one node."""
    made = []
    node = counted_trie.TrieNode
    monkeypatch.setattr(counted_trie, "TrieNode", lambda *args: made.append(args) or node(*args))
    trie = CountedTrie(24)
    for token in range(200):
        trie.append(token)
    assert len(made) == 1 + 200
