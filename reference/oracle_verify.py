"""The oracle's verifiers, each as its paper tells it: from drafts and the target's law to the tokens of a round.

Sources, with the conventions of ties and empty residuals, stand with specsim.reference.acceptance, which walks arrays.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specsim.core.config import SpecConfig
from specsim.reference.oracle_distributions import inverse_cdf, ranked

Path = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A drafted token, the last of `path`, in its lane; the root has neither token nor parent.

    law: f64 [V], what the token was drawn from, None where it was not drawn. The last of the (token, hidden) `rows`
    proposed it and gave `hidden`.
    """

    path: Path
    parent: "Node | None"
    lane: int
    score: float
    law: torch.Tensor | None
    hidden: torch.Tensor | None
    rows: tuple[tuple[int, torch.Tensor], ...]

    @property
    def token(self) -> int:
        return self.path[-1]


@dataclass(frozen=True, slots=True, eq=False)
class Drafts:
    """One round as a verifier sees it.

    nodes: the root, then those that may be accepted, parents first. logits, prob: of the token after a node, [V].
    uniform: by (stream, depth, index). noise: Gumbel's, [V], of the token after a node of some depth.
    """

    nodes: list[Node]
    logits: Callable[[Node], torch.Tensor]
    prob: Callable[[Node], torch.Tensor]
    uniform: Callable[[str, int, int], float]
    noise: Callable[[int], torch.Tensor]

    def children(self, parent: Node) -> list[Node]:
        return [node for node in self.nodes if node.parent is parent]

    def bonus(self, mass_V: torch.Tensor) -> int:
        return inverse_cdf(mass_V, self.uniform("FINAL", 0, 0))


def accepted(drafts: Drafts, config: SpecConfig, is_greedy: bool) -> Path:
    """The tokens that a round adds: the drafts that are accepted, and the bonus."""
    if not is_greedy and config.verifier in ("block", "typical"):
        return {"block": block, "typical": typical}[config.verifier](drafts, config)
    step = greedy if is_greedy else STEPS[config.verifier]
    node, token, child = drafts.nodes[0], None, drafts.nodes[0]
    while child is not None:
        node = child
        child, token = step(drafts, node, config)
    return (*node.path, token)


Step = tuple[Node | None, int | None]  # the child that is accepted, or None and the bonus


def greedy(drafts: Drafts, node: Node, config: SpecConfig) -> Step:
    """The target's argmax, a draft or not."""
    return _wanted(drafts, node, ranked(drafts.logits(node))[0])


def gumbel(drafts: Drafts, node: Node, config: SpecConfig) -> Step:
    """The token that maximises log p + noise, which has the law p."""
    return _wanted(drafts, node, ranked(drafts.prob(node).log() + drafts.noise(len(node.path)))[0])


def _wanted(drafts: Drafts, node: Node, token: int) -> Step:
    return next((child for child in drafts.children(node) if child.token == token), None), token


def target_only(drafts: Drafts, node: Node, config: SpecConfig) -> Step:
    """The first child with uniform ≤ p(children up to it) / threshold_acc or p(child) ≥ threshold_single; else a draw
    from p without the children.
    """
    prob_V, children, mass = drafts.prob(node), drafts.children(node), 0.0
    for child in children:
        mass += float(prob_V[child.token])
        allowed = mass / max(config.threshold_acc, 1e-9)
        if drafts.uniform("ACCEPT", len(node.path), 0) <= allowed or prob_V[child.token] >= config.threshold_single:
            return child, None
    rest_V = prob_V.clone()
    rest_V[[child.token for child in children]] = 0.0
    return None, drafts.bonus(rest_V if rest_V.any() else prob_V)


def multi_round(drafts: Drafts, node: Node, config: SpecConfig) -> Step:
    """The first child x with uniform · q(x) < p(x), a uniform a child; p becomes what p has more than q after each
    that is not. With one child it is chain rejection.
    """
    prob_V = drafts.prob(node)
    for child in drafts.children(node):
        if drafts.uniform("ACCEPT", len(node.path), child.lane) * child.law[child.token] < prob_V[child.token]:
            return child, None
        prob_V = excess(prob_V, child.law)
    return None, drafts.bonus(prob_V)


STEPS = {"target_only": target_only, "rejection": multi_round, "multi_round": multi_round, "gumbel": gumbel}


def block(drafts: Drafts, config: SpecConfig) -> Path:
    """The longest prefix of the chain whose uniform is below h_i, with the weight w_i = min(1, w_(i-1) p(x_i) /
    q(x_i)): h_i = r / (r + 1 - w_i), r what w_i p has more than q of the next draft, and h = w at the end of the chain.
    """
    chain, weight, best = drafts.nodes, 1.0, 0
    weights = [weight]
    for depth, node in enumerate(chain[1:], 1):
        ratio = float(drafts.prob(node.parent)[node.token]) / float(node.law[node.token])
        weight = min(1.0, weight * ratio)
        weights.append(weight)
        if depth < len(chain) - 1:
            rest = float((weight * drafts.prob(node) - chain[depth + 1].law).clamp(min=0).sum())
            height = rest / (rest + 1 - weight) if rest else 0.0
        else:
            height = weight
        best = depth if drafts.uniform("ACCEPT", depth - 1, 0) < height else best
    prob_V = drafts.prob(chain[best])
    is_whole = best == len(chain) - 1
    return (*chain[best].path, drafts.bonus(prob_V if is_whole else excess(prob_V, chain[best + 1].law, weights[best])))


def typical(drafts: Drafts, config: SpecConfig) -> Path:
    """Of the nodes that are probable enough with all their ancestors the deepest, of these the one whose path is most
    probable; a draft is probable enough above min(ε, δ exp(-H)), H the entropy of its law.
    """
    passing = {drafts.nodes[0]: 1.0}
    for node in drafts.nodes[1:]:
        if node.parent in passing:
            prob_V = drafts.prob(node.parent)
            entropy = -float(torch.xlogy(prob_V, prob_V).sum())
            if prob_V[node.token] > min(config.typical_epsilon, config.typical_delta * math.exp(-entropy)):
                passing[node] = passing[node.parent] * float(prob_V[node.token])
    best = max(passing, key=lambda node: (len(node.path), passing[node]))
    return (*best.path, drafts.bonus(drafts.prob(best)))


def excess(prob_V: torch.Tensor, law_V: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    """What weight · p has more than q, as a law; p itself where that is nothing."""
    rest_V = (weight * prob_V - law_V).clamp(min=0)
    return rest_V / rest_V.sum() if rest_V.any() else prob_V
