"""Which drafts the target takes, and the token after them: every verifier as a function of one request's tree, laws
and uniforms.

Each returns (path of nodes from the root, bonus token). prob_NV: f64 [N, V], row n the target's law of the token after
node n. draft_prob_*: the law that a draft was sampled from, by its parent, f64 or f32. Uniforms are uniforms in (0, 1).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from specsim.reference.sampling import argmax, inverse_cdf

Accepted = tuple[list[int], int]


@dataclass(frozen=True, slots=True)
class Tree:
    """One request's tree as verify walks it: lists of N; depth_limit is the deepest node that may be accepted."""

    tokens: list[int]
    parents: list[int]
    next_token: list[int]
    next_sibling: list[int]
    depth_limit: int

    def children(self, node: int) -> Iterator[int]:
        child = self.next_token[node]
        while child >= 0:
            yield child
            child = self.next_sibling[child]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root's to the node's own."""
        return [self.tokens[node] for node in self.path(node)]

    def chain(self) -> range:
        """Node numbers of a chain's drafts, as far as they may be accepted: those of depth 1, 2, ..."""
        return range(1, max(0, min(len(self.tokens) - 1, self.depth_limit)) + 1)


def residual(prob_V: torch.Tensor, draft_prob_V: torch.Tensor) -> torch.Tensor:
    """relu(prob - draft_prob), weights of what a rejected draft leaves; where that is nothing, prob itself."""
    weight_V = (prob_V - draft_prob_V).clamp(min=0)
    return weight_V if bool(weight_V.sum() > 0) else prob_V


def greedy(tree: Tree, adjusted_NV: torch.Tensor) -> Accepted:
    """Follow the child that holds the argmax of the current node."""
    best = argmax(adjusted_NV).tolist()
    path = [0]
    while len(path) <= tree.depth_limit:
        match = next((child for child in tree.children(path[-1]) if tree.tokens[child] == best[path[-1]]), None)
        if match is None:
            break
        path.append(match)
    return path, best[path[-1]]


def target_only(
    tree: Tree,
    prob_NV: torch.Tensor,
    uniforms: list[float],
    final_uniform: float,
    threshold_single: float,
    threshold_acc: float,
) -> Accepted:
    """Target-only sampling: drafts are points, accepted with the target's own probability (SGLang).

    A node has one uniform u, uniforms[depth], for all its children in sibling order: with acc the probability of the
    children so far, child c is accepted if u ≤ acc / threshold_acc or p(c) ≥ threshold_single. If none is, the bonus
    comes from p without the rejected children. Thresholds of 1 leave the target's law unchanged.
    """
    path = [0]
    while True:
        prob_V = prob_NV[path[-1]].clone()
        children = tree.children(path[-1]) if len(path) <= tree.depth_limit else ()
        accumulated, accepted = 0.0, None
        for child in children:
            child_prob = float(prob_V[tree.tokens[child]])
            accumulated += child_prob
            if uniforms[len(path) - 1] <= accumulated / max(threshold_acc, 1e-9) or child_prob >= threshold_single:
                accepted = child
                break
            prob_V[tree.tokens[child]] = 0.0
        if accepted is None:
            has_mass = bool(prob_V.sum() > 0)
            return path, inverse_cdf(prob_V if has_mass else prob_NV[path[-1]], final_uniform)
        path.append(accepted)


def typical(tree: Tree, prob_NV: torch.Tensor, epsilon: float, delta: float, final_uniform: float) -> Accepted:
    """Medusa's typical acceptance (arXiv 2401.10774), which does not keep the target's law.

    A draft x is acceptable where p(x) > min(ε, δ exp(-H(p))), H the entropy in nats. Of the nodes that are acceptable
    with all their ancestors the deepest is taken, of these the most probable path, of these the first node; the bonus
    comes from p.
    """
    entropy_N = torch.special.entr(prob_NV).sum(-1)
    threshold_N = (delta * (-entropy_N).exp()).clamp(max=epsilon)
    ranks = {0: (0, 1.0, 0)}
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if parent in ranks and ranks[parent][0] < tree.depth_limit and prob_NV[parent, token] > threshold_N[parent]:
            depth, path_prob, _ = ranks[parent]
            ranks[node] = depth + 1, path_prob * float(prob_NV[parent, token]), -node
    best = max(ranks, key=ranks.get)
    return tree.path(best), inverse_cdf(prob_NV[best], final_uniform)


def rejection(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_SV: torch.Tensor, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Chain rejection (arXiv 2211.17192): a draft x ~ q of depth d + 1 is accepted if uniforms[d] q(x) < p(x); the
    bonus comes from relu(p - q) at the first that is not, and from p where all are.
    """
    for node in tree.chain():
        token, prob_V, draft_prob_V = tree.tokens[node], prob_NV[node - 1], draft_prob_SV[node - 1]
        if uniforms[node - 1] * float(draft_prob_V[token]) >= float(prob_V[token]):
            return tree.path(node - 1), inverse_cdf(residual(prob_V, draft_prob_V), final_uniform)
    last = len(tree.chain())
    return tree.path(last), inverse_cdf(prob_NV[last], final_uniform)


def block(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_SV: torch.Tensor, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Block verification of a chain (arXiv 2403.10444): the longest prefix that passes is taken; every uniform is read.

    With w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)) and r_i = Σ relu(w_i p - q) after draft i, prefix i passes if
    uniforms[i-1] (r_i + 1 - w_i) < r_i, the whole chain if its uniform < w_S. The bonus comes from relu(w_i p - q), at
    full depth from p. Derived in papers/block-verification.
    """
    last, kept, accepted = len(tree.chain()), 1.0, 0
    bonus_V = residual(prob_NV[0], draft_prob_SV[0]) if last else prob_NV[0]
    for node in tree.chain():
        token, uniform = tree.tokens[node], uniforms[node - 1]
        target, draft = kept * float(prob_NV[node - 1, token]), float(draft_prob_SV[node - 1, token])
        kept = target / draft if target < draft else 1.0
        if node == last:
            weight_V, passes = prob_NV[node], uniform < kept
        else:
            weight_V = (kept * prob_NV[node] - draft_prob_SV[node]).clamp(min=0)
            mass = float(weight_V.sum())
            passes = uniform * (mass + 1 - kept) < mass
        if passes:
            accepted, bonus_V = node, weight_V
    return tree.path(accepted), inverse_cdf(bonus_V, final_uniform)


def multi_round(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: torch.Tensor, uniforms_N: list[float], final_uniform: float
) -> Accepted:
    """SpecInfer's multi-round verification (arXiv 2305.09781): siblings are drawn independently from one law q, row
    draft_prob_NV[parent], and may hold the same token.

    They are tried in order, each with its own uniform: x is accepted if uniforms_N[node] q(x) < p(x), and after a
    rejection p becomes relu(p - q), normalised. The bonus comes from the p that is left, at a leaf from the node's own.
    """
    path = [0]
    while True:
        prob_V, draft_prob_V, accepted = prob_NV[path[-1]], draft_prob_NV[path[-1]], None
        for child in tree.children(path[-1]) if len(path) <= tree.depth_limit else ():
            token = tree.tokens[child]
            if uniforms_N[child] * float(draft_prob_V[token]) < float(prob_V[token]):
                accepted = child
                break
            prob_V = residual(prob_V, draft_prob_V)
            prob_V = prob_V / prob_V.sum()
        if accepted is None:
            return path, inverse_cdf(prob_V, final_uniform)
        path.append(accepted)


def gumbel(tree: Tree, prob_NV: torch.Tensor, noise_WV: torch.Tensor) -> Accepted:
    """Gumbel-max coupling (arXiv 2408.07978): the target's token after a node of depth d is the argmax of log p +
    noise_WV[d], standard Gumbel noise of that token's position, which its draft was the argmax of log q with.

    Drafts are accepted while they are the target's tokens. noise_WV: [S+1, V], the bonus' position last.
    """
    depths = [len(tree.path(node)) - 1 for node in range(len(tree.tokens))]
    return greedy(tree, prob_NV.log() + noise_WV[depths])
