"""Choices of verified tokens, checked against the logits under test: in float64, up to the error of float32 arithmetic.

The walk through a request's tree is the one that the implementation reports. Verifiers other than the default one run
in the reference's form on its distributions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Sampling, VerifyOutput
from specsim.core.rule import AcceptanceRule
from specsim.correctness.differential.comparison import FLOAT32_EPS, Mismatch
from specsim.correctness.differential.step import ComparedRequest

if TYPE_CHECKING:
    from specsim.core.rule import Tree

LEAST = 2.0**-24
MOST = 1 - 2.0**-24  # the largest uniform
OF_ENTROPY = 30.0  # factor for an entropy, which sums the errors of log probabilities


@dataclass(frozen=True, slots=True)
class RowDistribution:
    """The distribution of one row of logits."""

    adjusted_V: torch.Tensor  # f64, logits after penalties and bias
    sampling: Sampling  # of one request
    noise: float  # bound on the error of each logit
    is_known: bool = False  # the logits are exact and nothing was added, so float32 keeps their order and ties

    @classmethod
    def of_own_logits(cls, logits_V: torch.Tensor, adjusted_V: torch.Tensor, sampling: Sampling) -> "RowDistribution":
        """Make the distribution that an implementation has to follow, given its own logits."""
        return cls(adjusted_V, sampling, rounding(adjusted_V), torch.equal(logits_V.double(), adjusted_V))

    @property
    def temperature(self) -> float:
        return float(self.sampling.temperature)

    @property
    def slack(self) -> float:
        """Bound the error of a sum of probabilities.

        An error of e in the logits changes a probability by at most a factor of exp(2e / T); float32 rounds the sum.
        """
        return 2 * self.noise / self.temperature + 16 * FLOAT32_EPS

    def prob(self, **changes: float) -> torch.Tensor:
        """Compute the probabilities, f64 [V]; changes: parameters of the sampling."""
        from specsim.reference.sampling import target_prob

        parameters = {name: torch.full_like(getattr(self.sampling, name), value) for name, value in changes.items()}
        return target_prob(self.adjusted_V, replace(self.sampling, **parameters), 0)

    def logprob(self, token: int) -> float:
        from specsim.reference.sampling import logprob

        return logprob(self.adjusted_V, self.sampling, 0, token)

    def logprob_slack(self, noise: float) -> float:
        """Bound the error of a logprob whose logits are off by at most `noise`; float32 rounds it too."""
        return 2 * noise / (self.temperature or 1.0) + 16 * FLOAT32_EPS * max(1.0, math.log(len(self.adjusted_V)))

    def compare_argmax(self, name: str, token: int, node: int) -> None:
        """Require the first of the largest logits, or one that rounding may have made the largest."""
        largest = int((self.adjusted_V == self.adjusted_V.max()).nonzero()[0])
        margin = float(self.adjusted_V[largest] - self.adjusted_V[token])
        if token != largest and (self.is_known or not margin <= 2 * self.noise):
            raise Mismatch(name, largest, token, node)

    def compare_draw(self, name: str, weight_V: torch.Tensor, uniform: float, token: int, node: int | None) -> bool:
        """Require an inverse-CDF draw: the uniform lies in the token's share of the mass, or within the slack of it."""
        cdf_V = weight_V.cumsum(-1)
        at = uniform * float(cdf_V[-1])
        low = float(cdf_V[token] - weight_V[token])
        high = float(cdf_V[token])
        if not (weight_V[token] > 0 and low - self.slack <= at <= high + self.slack):
            return self.deny(name, int((cdf_V > at).nonzero()[0]), token, node)
        return True

    def deny(self, name: str, expected: object, actual: object, node: int | None) -> bool:
        """Reject a choice that does not follow; False where rounding may have moved the edge of a filter."""
        if not self.is_fragile():
            raise Mismatch(name, expected, actual, node)
        return False

    def is_fragile(self) -> bool:
        """Whether rounding decides if a token near a filter's edge is kept."""
        top_p = float(self.sampling.top_p)
        min_p = float(self.sampling.min_p)
        return (
            self._top_k_is_fragile(int(self.sampling.top_k))
            or (top_p < 1 and self._top_p_is_fragile(top_p))
            or (min_p > 0 and self._min_p_is_fragile(min_p))
        )

    def _top_k_is_fragile(self, top_k: int) -> bool:
        if not 0 < top_k < len(self.adjusted_V):
            return False
        last, next_one = self.adjusted_V.sort(descending=True).values[top_k - 1 : top_k + 1].tolist()
        return last - next_one <= 2 * self.noise and not (self.is_known and last == next_one)

    def _top_p_is_fragile(self, top_p: float) -> bool:
        ordered = self.prob(top_p=1.0, min_p=0.0).sort(descending=True).values
        return bool((ordered.cumsum(-1) - ordered - top_p).abs().min() <= self.slack)

    def _min_p_is_fragile(self, min_p: float) -> bool:
        prob_V = self.prob(min_p=0.0)
        return bool(((prob_V / prob_V.max() / min_p - 1).abs() <= self.slack).any())


def rounding(adjusted_V: torch.Tensor) -> float:
    """Bound the error of float32 arithmetic on exactly known logits."""
    finite = adjusted_V[adjusted_V.isfinite()]
    return 16 * FLOAT32_EPS * float(finite.abs().max()) if len(finite) else 0.0


@dataclass(frozen=True, slots=True)
class ReportedWalk:
    """A path through a tree, and the token after it."""

    request: ComparedRequest[VerifyOutput]
    tree: "Tree"
    distributions: tuple[RowDistribution, ...]  # one for each node, from the logits under test
    draft_prob_MV: torch.Tensor | None  # of the implementation under test, None where the verifier reads none
    nodes: tuple[int, ...]  # from the root on
    bonus: int

    @property
    def tokens(self) -> list[int]:
        """The token after each node."""
        return [*(self.tree.tokens[node] for node in self.nodes[1:]), self.bonus]

    def children(self, depth: int) -> list[int]:
        """List the children of the path's node at a depth that may be accepted."""
        return list(self.tree.children(self.nodes[depth])) if depth < self.tree.depth_limit else []

    def accepted(self, depth: int) -> int | None:
        return self.nodes[depth + 1] if depth + 1 < len(self.nodes) else None


def reported_walk(request: ComparedRequest[VerifyOutput], adjusted_NV: torch.Tensor) -> ReportedWalk:
    """Read the path in accept_index: from the root, child by child, within the allowed depth, then -1."""
    from specsim.reference.tree import trees

    step = request.step
    tree = trees(step.batch, step.trees.reference, step.config.length_limit)[request.index]
    accept_index = request.states.map(lambda output: output.verdict.accept_index[request.index].tolist())
    row = accept_index.fast
    first = request.nodes.start
    path = tuple(node - first for node in row if node != -1)
    steps = all(0 < b < len(tree.parents) and tree.parents[b] == a for a, b in pairwise(path))
    is_path = path[:1] == (0,) and steps and len(path) <= max(tree.depth_limit, 0) + 1
    padded = [first + node for node in path] + [-1] * (len(row) - len(path))
    request.check.require("accept_index", is_path and row == padded, accept_index.reference, row)
    output = request.states.fast
    rows = zip(output.target_logits[request.nodes], adjusted_NV, strict=True)
    sampling = request.batch.sampling
    distributions = tuple(RowDistribution.of_own_logits(*row, sampling) for row in rows)
    draft_prob = request.of(step.trees).field("draft_prob").fast
    draft_prob_MV = None if draft_prob is None else draft_prob.cpu()
    bonus = int(output.verdict.predict[request.nodes][path[-1]])
    return ReportedWalk(request, tree, distributions, draft_prob_MV, path, bonus)


def compare_accepted(walk: ReportedWalk) -> int | None:
    """Require the path and bonus that follow from the distributions, up to their rounding error.

    Returns the number of choices, None where rounding decided one.
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
    if (path, bonus) == (walk.nodes, walk.bonus):
        return len(walk.nodes)
    slack = max(distribution.slack for distribution in walk.distributions)
    finals = [min(max(draws.final + sign * slack, LEAST), MOST) for sign in (0, -1, 1)]
    for move_NV, moved_final, setting in product(_moves(prob_NV, walk), finals, _settings(config, slack, rule)):
        moved_NV = prob_NV * (len(walk.nodes) * slack * move_NV).exp()
        if result(moved_NV, moved_final, setting) == (walk.nodes, walk.bonus):
            return None
    _deny(walk, path, bonus)
    return None


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
    """Reject the first node at which the implementation did not go as expected."""
    same = sum(a == b for a, b in zip(path, walk.nodes, strict=False))
    node = walk.nodes[same - 1]
    distribution = walk.distributions[node]
    if path == walk.nodes:
        distribution.deny("predict", bonus, walk.bonus, node)
    else:
        expected, actual = (row[same] if same < len(row) else None for row in (path, walk.nodes))
        distribution.deny("accept_index", expected, actual, node)
