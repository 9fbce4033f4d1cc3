"""Random requests of token drafters, and comparisons of their two implementations."""

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specsim.core.token_drafter import Proposal, TreeLimits

Makes = Mapping[str, Callable[[Any], Any]]  # drafters of a config, by implementation


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


def token_streams(rng: random.Random) -> Iterator[tuple[int, list[int]]]:
    """Grow several requests in turn by new tokens, repetitions of their beginning, and periods."""
    vocab_size = rng.randint(1, 5)
    texts: dict[int, list[int]] = {}
    for _ in range(30):
        request_id = rng.randrange(5)
        if request_id not in texts or rng.random() < 0.05:
            texts[request_id] = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        text = texts[request_id]
        new = [rng.randrange(vocab_size) for _ in range(rng.randint(0, 3))]
        text += rng.choice([text[: rng.randint(0, 5)], text[-rng.randint(1, 3) :] * 2, new])
        yield request_id, text


def assert_within_limits(proposal: Proposal, limits: TreeLimits) -> None:
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


def assert_equal_proposals(makes: Makes, random_config: Callable, topk: int, seed: int) -> None:
    """Compare proposals, scores bit for bit, while requests interleave, end and reuse ids."""
    rng = random.Random(f"{topk} {seed}")
    num_drafts = 0
    for _ in range(10):
        config = random_config(rng)
        drafters = [make(config) for make in makes.values()]
        for request_id, text in token_streams(rng):
            num_steps = rng.randint(0, 6)
            limits = chain(num_steps) if topk == 1 else TreeLimits(num_steps, rng.randint(0, 12), topk)
            expected, proposal = (drafter.propose(request_id, text, limits) for drafter in drafters)
            assert proposal == expected
            assert_within_limits(proposal, limits)
            num_drafts += len(proposal.tokens)
            if rng.random() < 0.15:
                prompt_len = rng.randint(0, len(text))
                for drafter in drafters:
                    drafter.finish(request_id, text, prompt_len)
    assert num_drafts > 200


def assert_a_reused_id_starts_over(make: Callable[[], Any]) -> None:
    for limits in (chain(3), TreeLimits(3, 7, 2)):
        drafter = make()
        for text in ("1231", "12314", "4561", "1", "11", "4561456"):
            proposal = drafter.propose(0, tuple(digits(text)), limits)
            assert proposal == make().propose(0, digits(text), limits)
        assert proposal.tokens
