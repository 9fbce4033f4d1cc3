"""Verifiers of the oracle, each as in its paper: from drafts and the target's distributions to a round's tokens.

specsim.reference.acceptance names the papers and says how ties and empty residuals are resolved.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specsim.core.config import SpecConfig
from specsim.core.verifiers import resolve
from specsim.reference.oracle_distributions import inverse_cdf, ranked
from specsim.reference.oracle_draft import DraftNode, Path


@dataclass(frozen=True, slots=True, eq=False)
class OracleDrafts:
    """The drafts of one round, with the target's distributions and the round's random draws."""

    nodes: list[DraftNode]  # the root, then those that may be accepted, parents first
    logits: Callable[[DraftNode], torch.Tensor]  # [V], of the token after a node
    prob: Callable[[DraftNode], torch.Tensor]  # [V], distribution p of the token after a node
    uniform: Callable[[str, int, int], float]  # by (stream, depth, index)
    noise: Callable[[int], torch.Tensor]  # [V], Gumbel noise of the token after a node of that depth

    def children(self, parent: DraftNode) -> list[DraftNode]:
        return [node for node in self.nodes if node.parent is parent]

    def bonus(self, mass_V: torch.Tensor) -> int:
        return inverse_cdf(mass_V, self.uniform("FINAL", 0, 0))


def accepted(drafts: OracleDrafts, config: SpecConfig, is_greedy: bool) -> Path:
    """List the tokens that a round adds: the accepted drafts and the bonus."""
    return (greedy if is_greedy else resolve(config.verifier_kind.oracle))(drafts, config)


Step = DraftNode | int  # the accepted child, or the bonus


def by_steps(step: Callable[[OracleDrafts, DraftNode, SpecConfig], Step]) -> Callable[[OracleDrafts, SpecConfig], Path]:
    """Make a verifier of a function that accepts a child of one node, or draws the bonus after it."""

    def walk(drafts: OracleDrafts, config: SpecConfig) -> Path:
        node = drafts.nodes[0]
        while not isinstance(result := step(drafts, node, config), int):
            node = result
        return (*node.path, result)

    return walk


@by_steps
def greedy(drafts: OracleDrafts, node: DraftNode, config: SpecConfig) -> Step:
    """Take the target's argmax."""
    return _child_or_bonus(drafts, node, ranked(drafts.logits(node))[0])


@by_steps
def gumbel(drafts: OracleDrafts, node: DraftNode, config: SpecConfig) -> Step:
    """Take argmax(log p + noise), which is distributed as p."""
    return _child_or_bonus(drafts, node, ranked(drafts.prob(node).log() + drafts.noise(len(node.path)))[0])


def _child_or_bonus(drafts: OracleDrafts, node: DraftNode, token: int) -> Step:
    return next((child for child in drafts.children(node) if child.token == token), token)


@by_steps
def target_only(drafts: OracleDrafts, node: DraftNode, config: SpecConfig) -> Step:
    """Take the first child with u ≤ p(children up to it) / threshold_acc or p(child) ≥ threshold_single.

    If there is none, draw the bonus from p without the children.
    """
    prob_V = drafts.prob(node)
    children = drafts.children(node)
    mass = 0.0
    for child in children:
        mass += float(prob_V[child.token])
        allowed = mass / max(config.threshold_acc, 1e-9)
        if drafts.uniform("ACCEPT", len(node.path), 0) <= allowed or prob_V[child.token] >= config.threshold_single:
            return child
    rest_V = prob_V.clone()
    rest_V[[child.token for child in children]] = 0.0
    return drafts.bonus(rest_V if rest_V.any() else prob_V)


@by_steps
def multi_round(drafts: OracleDrafts, node: DraftNode, config: SpecConfig) -> Step:
    """Take the first child x with its u · q(x) < p(x).

    After each rejection p becomes the residual distribution. With one child this is chain rejection.
    """
    prob_V = drafts.prob(node)
    for child in drafts.children(node):
        if drafts.uniform("ACCEPT", len(node.path), child.lane) * child.proposal[child.token] < prob_V[child.token]:
            return child
        prob_V = residual(prob_V, child.proposal)
    return drafts.bonus(prob_V)


@by_steps
def recursive(drafts: OracleDrafts, node: DraftNode, config: SpecConfig) -> Step:
    """Take the first child x with its u · q(x) < p(x), where q lacks the children before it.

    After each rejection p becomes the residual distribution. A child is rejected where nothing is left of q.
    """
    prob_V = drafts.prob(node)
    tried: list[int] = []
    for child in drafts.children(node):
        draft_prob_V = child.proposal.clone()
        draft_prob_V[tried] = 0.0
        if draft_prob_V.any():
            draft_prob_V = draft_prob_V / draft_prob_V.sum() if tried else draft_prob_V
            if drafts.uniform("ACCEPT", len(node.path), child.lane) * draft_prob_V[child.token] < prob_V[child.token]:
                return child
            prob_V = residual(prob_V, draft_prob_V)
        tried.append(child.token)
    return drafts.bonus(prob_V)


def block(drafts: OracleDrafts, config: SpecConfig) -> Path:
    """Take the longest prefix of the chain whose uniform is below h_i.

    w_i = min(1, w_(i-1) p(x_i) / q(x_i)); h_i = r / (r + 1 - w_i) with r = Σ relu(w_i p - q of the next draft), and h_i
    = w_i at the end of the chain.
    """
    chain = drafts.nodes
    weight = 1.0
    best = 0
    weights = [weight]
    for depth, node in enumerate(chain[1:], 1):
        ratio = float(drafts.prob(chain[depth - 1])[node.token]) / float(node.proposal[node.token])
        weight = min(1.0, weight * ratio)
        weights.append(weight)
        if depth < len(chain) - 1:
            rest = float((weight * drafts.prob(node) - chain[depth + 1].proposal).clamp(min=0).sum())
            height = rest / (rest + 1 - weight) if rest else 0.0
        else:
            height = weight
        best = depth if drafts.uniform("ACCEPT", depth - 1, 0) < height else best
    prob_V = drafts.prob(chain[best])
    if best < len(chain) - 1:
        prob_V = residual(prob_V, chain[best + 1].proposal, weights[best])
    return (*chain[best].path, drafts.bonus(prob_V))


def traversal(drafts: OracleDrafts, config: SpecConfig) -> Path:
    """Take the first leaf that its uniform accepts, and remove those that are rejected before it.

    A leaf of weight w is accepted with probability w; its weight is min(1, w p(x) / q(x)) of its parent's. A removal
    leaves the parent p = relu(w p - q) / r and w = r / (r + 1 - w), r = Σ relu(w p - q). The root is not removed.
    """
    root, *rest = drafts.nodes
    weights = {root: 1.0}
    probs = {node: drafts.prob(node) for node in drafts.nodes}
    while True:
        node = root
        while children := [child for child in rest if child.parent is node]:
            ratio = float(probs[node][children[0].token] / children[0].proposal[children[0].token])
            weights.setdefault(children[0], min(1.0, weights[node] * ratio))  # as when it is reached first
            node = children[0]
        parent = node.parent
        if parent is None or drafts.uniform("ACCEPT", len(parent.path), node.lane) < weights[node]:
            return (*node.path, drafts.bonus(probs[node]))
        rest.remove(node)
        rest_V = (weights[parent] * probs[parent] - node.proposal).clamp(min=0)
        mass = float(rest_V.sum())
        probs[parent] = rest_V / mass if mass else probs[parent]
        weights[parent] = mass / (mass + 1 - weights[parent]) if mass else 0.0


def typical(drafts: OracleDrafts, config: SpecConfig) -> Path:
    """Take the deepest node that passes with all its ancestors.

    Among equals, take the one with the most probable path. A draft passes if p(x) > min(ε, δ exp(-H(p))), H the
    entropy.
    """
    passing = {drafts.nodes[0]: 1.0}
    for node in drafts.nodes[1:]:
        parent = node.parent
        if parent is not None and parent in passing:
            prob_V = drafts.prob(parent)
            entropy = -float(torch.xlogy(prob_V, prob_V).sum())
            if prob_V[node.token] > min(config.typical_epsilon, config.typical_delta * math.exp(-entropy)):
                passing[node] = passing[parent] * float(prob_V[node.token])
    best = max(passing, key=lambda node: (len(node.path), passing[node]))
    return (*best.path, drafts.bonus(drafts.prob(best)))


def residual(prob_V: torch.Tensor, draft_prob_V: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
    """Residual distribution relu(weight · p - q), normalised, or p itself where that is 0 everywhere."""
    rest_V = (weight * prob_V - draft_prob_V).clamp(min=0)
    return rest_V / rest_V.sum() if rest_V.any() else prob_V
