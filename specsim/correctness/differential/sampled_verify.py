"""The other verifiers: what float64 makes of the column's own logits and draft laws, by the reference's functions."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from specsim.correctness.differential.distribution import Law
from specsim.correctness.differential.divergence import Undecidable
from specsim.correctness.differential.scene import Scene

Accepted = tuple[list[int], int]
LEAST, MOST = 2.0**-24, 1 - 2.0**-24  # of a uniform
OF_ENTROPY = 30.0  # an entropy adds up the errors of log probabilities


def compare_accepted(
    scene: Scene,
    request: int,
    tree,
    laws: tuple[Law, ...],
    draft_prob_MV: torch.Tensor | None,
    nodes: tuple[int, ...],
    bonus: int,
) -> int:
    """The path and the bonus that follow; where they do not, laws that rounding could have made have to give them.

    Returns the number of choices.
    """
    from specsim.reference.verify import accepted, round_noise, round_uniforms

    config, vocab_size, found = scene.config, len(laws[0].adjusted_V), (list(nodes), bonus)
    batch = scene.batch.filter(torch.tensor([request]))
    uniforms, finals = round_uniforms(batch, config)
    noise = round_noise(batch, config, vocab_size)[0] if config.verifier == "gumbel" else None
    prob_NV, final = torch.stack([law.prob() for law in laws]), float(finals[0])
    expected = accepted(tree, prob_NV, draft_prob_MV, (uniforms[0], final, noise), config)
    if expected != found:
        slack, tokens = max(law.slack for law in laws), [*(tree.tokens[node] for node in nodes[1:]), bonus]
        moves = _moves(prob_NV, nodes, tokens)
        finals = [min(max(final + sign * slack, LEAST), MOST) for sign in (0, -1, 1)]
        for move_NV, uniform, setting in product(moves, finals, _settings(config, slack)):
            moved_NV = prob_NV * (len(nodes) * slack * move_NV).exp()
            if accepted(tree, moved_NV, draft_prob_MV, (uniforms[0], uniform, noise), setting) == found:
                raise Undecidable
        _deny(laws, expected, found)
    return len(nodes)


def _moves(prob_NV: torch.Tensor, nodes: tuple[int, ...], tokens: list[int]) -> Iterator[torch.Tensor]:
    """Which probabilities go up (1), and which down (-1), so that a path and its bonus become likelier: the laws of the
    first nodes of the path against all others, or the path's own tokens against the rest of their laws; and where the
    bonus is drawn, tokens up to it against those behind it. A residual of small mass makes much of a small move.
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


def _settings(config, slack: float) -> Iterator:
    yield config
    for name, sign in product(("typical_epsilon", "typical_delta"), (-1, 1)) if config.verifier == "typical" else ():
        yield replace(config, **{name: min(getattr(config, name) * (1 + sign * OF_ENTROPY * slack), 1.0)})


def _deny(laws: tuple[Law, ...], expected: Accepted, found: Accepted) -> None:
    """Names the first node at which the column went elsewhere."""
    (path, bonus), (own, own_bonus) = expected, found
    same = sum(a == b for a, b in zip(path, own, strict=False))
    node = own[same - 1]
    if path == own:
        laws[node].deny("predict", bonus, own_bonus, node)
    ours, theirs = (row[same] if same < len(row) else None for row in (path, own))
    laws[node].deny("accept_index", ours, theirs, node)
