"""The other verifiers: the reference's functions in float64, on the implementation's own distributions."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from specsim.core.config import SpecConfig
from specsim.correctness.differential.distribution import RowDistribution
from specsim.correctness.differential.divergence import Undecidable
from specsim.correctness.differential.scene import Scene

if TYPE_CHECKING:
    from specsim.reference.request_tree import Tree

Accepted = tuple[list[int], int]
LEAST = 2.0**-24
MOST = 1 - 2.0**-24  # of a uniform
OF_ENTROPY = 30.0  # an entropy adds up the errors of log probabilities


def compare_accepted(
    scene: Scene,
    request: int,
    tree: "Tree",
    distributions: tuple[RowDistribution, ...],
    draft_prob_MV: torch.Tensor | None,
    nodes: tuple[int, ...],
    bonus: int,
) -> int:
    """Compare path and bonus with those that follow, or that follow from distributions within rounding error.

    Returns the number of choices.
    """
    from specsim.reference.verify import accepted, round_noise, round_uniforms

    config = scene.config
    vocab_size = len(distributions[0].adjusted_V)
    found = (list(nodes), bonus)
    batch = scene.batch.filter(torch.tensor([request]))
    uniforms, finals = round_uniforms(batch, config)
    noise = round_noise(batch, config, vocab_size)[0] if config.verifier == "gumbel" else None
    prob_NV = torch.stack([distribution.prob() for distribution in distributions])
    final = float(finals[0])
    expected = accepted(tree, prob_NV, draft_prob_MV, (uniforms[0], final, noise), config)
    if expected != found:
        slack = max(distribution.slack for distribution in distributions)
        tokens = [*(tree.tokens[node] for node in nodes[1:]), bonus]
        moves = _moves(prob_NV, nodes, tokens)
        finals = [min(max(final + sign * slack, LEAST), MOST) for sign in (0, -1, 1)]
        for move_NV, uniform, setting in product(moves, finals, _settings(config, slack)):
            moved_NV = prob_NV * (len(nodes) * slack * move_NV).exp()
            if accepted(tree, moved_NV, draft_prob_MV, (uniforms[0], uniform, noise), setting) == found:
                raise Undecidable
        _deny(distributions, expected, found)
    return len(nodes)


def _moves(prob_NV: torch.Tensor, nodes: tuple[int, ...], tokens: list[int]) -> Iterator[torch.Tensor]:
    """Directions of probabilities, up (1) or down (-1), that make a path and its bonus likelier.

    They move the distributions of the first nodes of the path against all others, or the path's own tokens against the
    rest of their distributions; and where the bonus is drawn, tokens up to it against those behind it. A residual of
    small mass changes much with a small move.
    """
    rows = [torch.zeros_like(prob_NV)]
    for cut in range(len(nodes) + 1):
        rows.append(torch.full_like(prob_NV, -1.0))
        rows[-1][list(nodes[:cut])] = 1.0
    rows.append(torch.zeros_like(prob_NV))
    for node, token in zip(nodes, tokens, strict=True):
        rows[-1][node] = -1.0
        rows[-1][node, token] = 1.0
    for row, sign in product(rows, (1.0, -1.0)):
        yield sign * row
        for behind in (1.0, -1.0):
            parted = sign * row
            parted[nodes[-1], : tokens[-1] + (behind < 0)] = -behind
            parted[nodes[-1], tokens[-1] + (behind < 0) :] = behind
            yield parted


def _settings(config: SpecConfig, slack: float) -> Iterator[SpecConfig]:
    yield config
    for name, sign in product(("typical_epsilon", "typical_delta"), (-1, 1)) if config.verifier == "typical" else ():
        yield replace(config, **{name: min(getattr(config, name) * (1 + sign * OF_ENTROPY * slack), 1.0)})


def _deny(distributions: tuple[RowDistribution, ...], expected: Accepted, found: Accepted) -> None:
    """Name the first node at which the implementation went elsewhere."""
    (path, bonus) = expected
    (own, own_bonus) = found
    same = sum(a == b for a, b in zip(path, own, strict=False))
    node = own[same - 1]
    if path == own:
        distributions[node].deny("predict", bonus, own_bonus, node)
    ours, theirs = (row[same] if same < len(row) else None for row in (path, own))
    distributions[node].deny("accept_index", ours, theirs, node)
