"""Verifiers: the accepted path of one request's tree, and the bonus token after it.

Arguments have one order: the tree, p, then q, accept uniforms or noise, the final uniform and thresholds, where read.

Symbols: p, a row of prob_NV (f64 [N, V]), is the target's distribution of the token after a node. q, a row of
draft_prob_*V (f32 or f64, by parent), is the distribution that its drafts were sampled from. A draft x with q(x) = 0
was not, as where the drafter's logits are NaN, and is rejected. Uniforms are in (0, 1).
"""

import torch

from specsim.core.rule import Accepted, Tree
from specsim.reference.sampling import argmax, inverse_cdf


def residual(prob_V: torch.Tensor, draft_prob_V: torch.Tensor) -> torch.Tensor:
    """Residual distribution relu(p - q), not normalised, or p itself where that is 0 everywhere."""
    weight_V = (prob_V - draft_prob_V).clamp(min=0)
    return weight_V if bool(weight_V.sum() > 0) else prob_V


def greedy(tree: Tree, adjusted_NV: torch.Tensor) -> Accepted:
    """Accept the child with the argmax of the current node's logits, until no child has it.

    The bonus is the last argmax.
    """
    best = argmax(adjusted_NV).tolist()
    path = [0]
    while True:
        matches = (child for child in tree.acceptable_children(path) if tree.tokens[child] == best[path[-1]])
        child = next(matches, None)
        if child is None:
            return Accepted(path, best[path[-1]])
        path.append(child)


def target_only(
    tree: Tree,
    prob_NV: torch.Tensor,
    uniforms: list[float],
    final_uniform: float,
    threshold_single: float,
    threshold_acc: float,
) -> Accepted:
    """Target-only sampling: drafts are accepted with the target's own probability (SGLang).

    Node n of depth d has one uniform, u = uniforms[d], for all its children c1, c2, ... in sibling order. The first ci
    with u ≤ (p(c1) + ... + p(ci)) / threshold_acc or p(ci) ≥ threshold_single is accepted. If there is none, the bonus
    is drawn from p without c1, c2, ... Thresholds of 1 keep the target's distribution.
    """
    path = [0]
    while True:
        prob_V = prob_NV[path[-1]].clone()
        accumulated = 0.0
        for child in tree.acceptable_children(path):
            child_prob = float(prob_V[tree.tokens[child]])
            accumulated += child_prob
            if uniforms[len(path) - 1] <= accumulated / max(threshold_acc, 1e-9) or child_prob >= threshold_single:
                path.append(child)
                break
            prob_V[tree.tokens[child]] = 0.0
        else:
            has_mass = bool(prob_V.sum() > 0)
            return Accepted(path, inverse_cdf(prob_V if has_mass else prob_NV[path[-1]], final_uniform))


def typical(tree: Tree, prob_NV: torch.Tensor, final_uniform: float, epsilon: float, delta: float) -> Accepted:
    """Medusa's typical acceptance (arXiv 2401.10774), which does not keep the target's distribution.

    A draft x passes where p(x) > min(ε, δ exp(-H(p))), H the entropy in nats. Among the nodes that pass with all their
    ancestors, the deepest is accepted; ties go to the most probable path, then to the first node. The bonus is drawn
    from p.
    """
    entropy_N = torch.special.entr(prob_NV).sum(-1)
    threshold_N = (delta * (-entropy_N).exp()).clamp(max=epsilon)
    ranks = {0: (0, 1.0, 0)}  # node: (depth, probability of its path, -node)
    for node, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True)):
        if parent in ranks and ranks[parent][0] < tree.depth_limit and prob_NV[parent, token] > threshold_N[parent]:
            depth, path_prob, _ = ranks[parent]
            ranks[node] = depth + 1, path_prob * float(prob_NV[parent, token]), -node
    best = max(ranks, key=lambda node: ranks[node])
    return Accepted(tree.path(best), inverse_cdf(prob_NV[best], final_uniform))


def rejection(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: torch.Tensor, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Chain rejection (arXiv 2211.17192), which accepts a draft x ~ q with probability min(1, p(x) / q(x)).

    The draft of depth d + 1 is accepted if uniforms[d] · q(x) < p(x). The bonus is drawn from relu(p - q) at the first
    rejected draft, or from p where all are accepted.
    """
    for node in tree.chain():
        token = tree.tokens[node]
        prob_V = prob_NV[node - 1]
        draft_prob_V = draft_prob_NV[node - 1]
        if not draft_prob_V[token] > 0 or uniforms[node - 1] * float(draft_prob_V[token]) >= float(prob_V[token]):
            return Accepted(tree.path(node - 1), inverse_cdf(residual(prob_V, draft_prob_V), final_uniform))
    last = len(tree.chain())
    return Accepted(tree.path(last), inverse_cdf(prob_NV[last], final_uniform))


def block(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: torch.Tensor, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Block verification of a chain (arXiv 2403.10444), which accepts the longest prefix that passes.

    Let w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)), r_i = Σ relu(w_i p - q) after draft i. Prefix i < S passes if
    uniforms[i-1] · (r_i + 1 - w_i) < r_i, prefix S if uniforms[S-1] < w_S. The bonus is drawn from relu(w_i p - q), and
    from p for i = S. Derived in papers/block-verification.
    """
    last = len(tree.chain())
    scale = 1.0  # w_i
    accepted = 0
    bonus_V = residual(prob_NV[0], draft_prob_NV[0]) if last else prob_NV[0]
    for node in tree.chain():
        token = tree.tokens[node]
        target = scale * float(prob_NV[node - 1, token])
        draft = float(draft_prob_NV[node - 1, token])
        scale = target / draft if target < draft else float(draft > 0)
        if node == last:
            weight_V = prob_NV[node]
            passes = uniforms[node - 1] < scale
        else:
            weight_V = (scale * prob_NV[node] - draft_prob_NV[node]).clamp(min=0)
            mass = float(weight_V.sum())
            passes = uniforms[node - 1] * (mass + 1 - scale) < mass
        if passes:
            accepted = node
            bonus_V = weight_V
    return Accepted(tree.path(accepted), inverse_cdf(bonus_V, final_uniform))


def multi_round(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: torch.Tensor, uniforms: list[float], final_uniform: float
) -> Accepted:
    """SpecInfer's multi-round verification (arXiv 2305.09781) of siblings drawn independently from their parent's q.

    Siblings are tried in order and may hold the same token. x is accepted if uniforms[its node] · q(x) < p(x); after a
    rejection p becomes relu(p - q), normalised. The bonus is drawn from the last p; at a leaf that is the node's own.
    """
    path = [0]
    while True:
        prob_V = prob_NV[path[-1]]
        draft_prob_V = draft_prob_NV[path[-1]]
        for child in tree.acceptable_children(path):
            token = tree.tokens[child]
            if draft_prob_V[token] > 0 and uniforms[child] * float(draft_prob_V[token]) < float(prob_V[token]):
                path.append(child)
                break
            prob_V = residual(prob_V, draft_prob_V)
            prob_V = prob_V / prob_V.sum()
        else:
            return Accepted(path, inverse_cdf(prob_V, final_uniform))


def traversal(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: torch.Tensor, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Traversal verification (arXiv 2505.12398), from the leaves to the root, of siblings drawn from their parent's q.

    A node has w, 1 at the root, and p. Its children are tried in order, each with everything below it, where child x
    has w = min(1, w p(x) / q(x)). After the rejection of a child, with r = Σ relu(w p - q), the node's p becomes
    relu(w p - q) / r and its w becomes r / (r + 1 - w). After that of all, the path to the node is accepted if
    uniforms[node] < w, and the root always is; the bonus is drawn from p. Of one chain it is block verification.
    """

    def accepted(path: list[int], weight: float | torch.Tensor) -> Accepted | None:
        prob_V = prob_NV[path[-1]]
        draft_prob_V = draft_prob_NV[path[-1]]
        for child in tree.acceptable_children(path):
            token = tree.tokens[child]
            if not draft_prob_V[token] > 0:
                continue
            ratio = weight * prob_V[token] / draft_prob_V[token]
            if result := accepted([*path, child], ratio if ratio < 1 else 1.0):
                return result
            weight_V = (weight * prob_V - draft_prob_V).clamp(min=0)
            mass = weight_V.sum()
            prob_V = weight_V / mass if mass > 0 else prob_V
            weight = mass / (mass + 1 - weight) if mass > 0 else 0.0
        is_accepted = path == [0] or uniforms[path[-1]] < weight
        return Accepted(path, inverse_cdf(prob_V, final_uniform)) if is_accepted else None

    result = accepted([0], 1.0)
    assert result is not None  # the root is accepted
    return result


def recursive(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: torch.Tensor, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Recursive rejection (arXiv 2402.14160) of siblings drawn from their parent's q without replacement.

    Siblings are tried in the order of their draws. x is accepted if uniforms[its node] · q(x) < p(x). After a rejection
    p becomes relu(p - q), normalised; then q loses x and is normalised. Where q has fewer tokens than there are
    siblings, the last ones find q(x) = 0 and are rejected. The bonus is drawn from the last p.
    """
    path = [0]
    while True:
        prob_V = prob_NV[path[-1]]
        draft_prob_V = draft_prob_NV[path[-1]]
        for child in tree.acceptable_children(path):
            token = tree.tokens[child]
            if draft_prob_V[token] > 0 and uniforms[child] * draft_prob_V[token] < prob_V[token]:
                path.append(child)
                break
            prob_V = residual(prob_V, draft_prob_V)
            prob_V = prob_V / prob_V.sum()
            draft_prob_V = without(draft_prob_V, token)
        else:
            return Accepted(path, inverse_cdf(prob_V, final_uniform))


def without(draft_prob_V: torch.Tensor, token: int) -> torch.Tensor:
    """Distribution q without a token, normalised, or 0 everywhere where no other token has mass."""
    weight_V = draft_prob_V.clone()
    weight_V[token] = 0.0
    mass = weight_V.sum()
    return weight_V / mass if bool(mass > 0) else weight_V


def gumbel(tree: Tree, prob_NV: torch.Tensor, noise_WV: torch.Tensor) -> Accepted:
    """Gumbel-max coupling (arXiv 2408.07978), which accepts drafts while they are the target's tokens.

    The target's token after a node of depth d is argmax(log p + noise_WV[d]), with standard Gumbel noise of that
    token's position, f64 [S+1, V]. The draft was argmax(log q + the same noise).
    """
    depths = [len(tree.path(node)) - 1 for node in range(len(tree.tokens))]
    return greedy(tree, prob_NV.log() + noise_WV[depths])
