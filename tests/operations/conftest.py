"""Random requests of token drafters, and the rules that every proposal keeps."""

import random
from collections.abc import Callable, Iterator

import pytest

from specsim.core.token_drafter import Proposal, TreeLimits


@pytest.fixture
def token_streams() -> Callable[[random.Random], Iterator[tuple[int, list[int]]]]:
    return _streams


@pytest.fixture
def assert_within_limits() -> Callable[[Proposal, TreeLimits], None]:
    return _assert_within


def _streams(rng: random.Random) -> Iterator[tuple[int, list[int]]]:
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


def _assert_within(proposal: Proposal, limits: TreeLimits) -> None:
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
