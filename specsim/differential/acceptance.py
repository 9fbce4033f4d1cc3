"""The other verifiers: what float64 makes of the column's own logits and draft laws, by the reference's functions."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from specsim.differential.divergence import Undecidable
from specsim.differential.law import Law
from specsim.differential.scene import Scene

Accepted = tuple[list[int], int]
STEPS = (1.0, 30.0, 1000.0)  # a residual of small mass makes a small error of a law a large one of its draw


def compare_accepted(
    scene: Scene,
    request: int,
    tree,
    laws: tuple[Law, ...],
    draft_prob_MV: torch.Tensor | None,
    nodes: tuple[int, ...],
    bonus: int,
) -> int:
    """The path and the bonus that follow; where they do not, other uniforms within the slack have to give them.

    Returns the number of choices.
    """
    from specsim.reference.verify import accepted, round_coins, round_noise

    config, vocab_size, found = scene.config, len(laws[0].adjusted_V), (list(nodes), bonus)
    batch = scene.batch.filter(torch.tensor([request]))
    coins, finals = round_coins(batch, config)
    noise = round_noise(batch, config, vocab_size)[0] if config.verifier == "gumbel" else None
    prob_NV = torch.stack([law.prob() for law in laws])
    expected = accepted(tree, prob_NV, draft_prob_MV, (coins[0], float(finals[0]), noise), config)
    if expected != found:
        slack, tokens = max(law.slack for law in laws), [*(tree.tokens[node] for node in nodes[1:]), bonus]
        for uniforms, changed in _nearby(config, coins[0], float(finals[0]), noise, tokens, slack):
            if accepted(tree, prob_NV, draft_prob_MV, uniforms, changed) == found:
                raise Undecidable
        _deny(laws, expected, found)
    return len(nodes)


def _nearby(config, coins: torch.Tensor, final: float, noise, tokens: list[int], slack: float) -> Iterator:
    """Uniforms and settings that rounding could have stood for, one changed at a time."""
    if noise is not None:
        raised = noise.clone()
        raised[torch.arange(len(tokens)), tokens] += 2 * slack
        yield (coins, final, raised), config
    for sign in (-1, 1):
        for step in STEPS:
            yield (coins, min(max(final + sign * step * slack, 0.0), 1.0), noise), config
        for place in range(len(coins)):
            moved = coins.clone()
            moved[place] = moved[place] * (1 + sign * STEPS[1] * slack) + sign * slack
            yield (moved, final, noise), config
        if config.verifier == "typical":
            for name in ("typical_epsilon", "typical_delta"):
                value = getattr(config, name) * (1 + sign * STEPS[1] * slack)
                yield (coins, final, noise), replace(config, **{name: min(value, 1.0)})


def _deny(laws: tuple[Law, ...], expected: Accepted, found: Accepted) -> None:
    """Names the first node at which the column went elsewhere."""
    (path, bonus), (own, own_bonus) = expected, found
    same = sum(a == b for a, b in zip(path, own, strict=False))
    node = own[same - 1]
    if path == own:
        laws[node].deny("predict", bonus, own_bonus, node)
    ours, theirs = (row[same] if same < len(row) else None for row in (path, own))
    laws[node].deny("accept_index", ours, theirs, node)
