"""Comparison of the other verifiers: the reference's functions in float64 on the implementation's distributions."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from specsim.core.config import SpecConfig
from specsim.core.rule import AcceptanceRule
from specsim.correctness.differential.comparison import WithinRoundingError
from specsim.correctness.differential.walk import ReportedWalk

LEAST = 2.0**-24
MOST = 1 - 2.0**-24  # the largest uniform
OF_ENTROPY = 30.0  # factor for an entropy, which sums the errors of log probabilities


def compare_accepted(walk: ReportedWalk) -> int:
    """Require the path and bonus that follow from the distributions, up to their rounding error.

    Returns the number of choices.
    """
    from specsim.reference.verify import accepted, round_draws

    config = walk.request.config
    rule = walk.request.step.implementations.reference.engine.rule
    batch = walk.request.batch
    prob_NV = torch.stack([distribution.prob() for distribution in walk.distributions])
    (draws,) = round_draws(batch, config, prob_NV.shape[1])

    def result(moved_NV: torch.Tensor, final: float, setting: SpecConfig) -> tuple[tuple[int, ...], int]:
        path, bonus = accepted(walk.tree, moved_NV, walk.draft_prob_MV, replace(draws, final=final), setting, rule)
        return tuple(path), bonus

    path, bonus = result(prob_NV, draws.final, config)
    if (path, bonus) != (walk.nodes, walk.bonus):
        slack = max(distribution.slack for distribution in walk.distributions)
        finals = [min(max(draws.final + sign * slack, LEAST), MOST) for sign in (0, -1, 1)]
        for move_NV, moved_final, setting in product(_moves(prob_NV, walk), finals, _settings(config, slack, rule)):
            moved_NV = prob_NV * (len(walk.nodes) * slack * move_NV).exp()
            if result(moved_NV, moved_final, setting) == (walk.nodes, walk.bonus):
                raise WithinRoundingError
        _deny(walk, path, bonus)
    return len(walk.nodes)


def _moves(prob_NV: torch.Tensor, walk: ReportedWalk) -> Iterator[torch.Tensor]:
    """Yield directions of probabilities, up (1) or down (-1), that make a path and its bonus likelier.

    They move the distributions of the first nodes of the path against all others, or the path's own tokens against the
    rest of their distributions. Where the bonus is drawn, they move tokens up to it against those after it. A residual
    of small mass changes much with a small move.
    """
    nodes = walk.nodes
    rows = [torch.zeros_like(prob_NV)]
    for cut in range(len(nodes) + 1):
        rows.append(torch.full_like(prob_NV, -1.0))
        rows[-1][list(nodes[:cut])] = 1.0
    rows.append(torch.zeros_like(prob_NV))
    for node, token in zip(nodes, walk.tokens, strict=True):
        rows[-1][node] = -1.0
        rows[-1][node, token] = 1.0
    for row, sign in product(rows, (1.0, -1.0)):
        yield sign * row
        for behind in (1.0, -1.0):
            parted = sign * row
            parted[nodes[-1], : walk.bonus + (behind < 0)] = -behind
            parted[nodes[-1], walk.bonus + (behind < 0) :] = behind
            yield parted


def _settings(config: SpecConfig, slack: float, rule: AcceptanceRule | None) -> Iterator[SpecConfig]:
    """Yield the setting, and those with thresholds moved by rounding errors; a rule reads none."""
    yield config
    for name, sign in product(config.verifier_kind.thresholds if rule is None else (), (-1, 1)):
        yield replace(config, **{name: min(getattr(config, name) * (1 + sign * OF_ENTROPY * slack), 1.0)})


def _deny(walk: ReportedWalk, path: tuple[int, ...], bonus: int) -> None:
    """Raise for the first node at which the implementation did not go as expected."""
    same = sum(a == b for a, b in zip(path, walk.nodes, strict=False))
    node = walk.nodes[same - 1]
    distribution = walk.distributions[node]
    if path == walk.nodes:
        distribution.deny("predict", bonus, walk.bonus, node)
    expected, actual = (row[same] if same < len(row) else None for row in (path, walk.nodes))
    distribution.deny("accept_index", expected, actual, node)
