"""Exercise 15-1: an acceptance rule, proved or refuted by enumeration."""

from collections.abc import Callable
from typing import Any

import torch

from specsim.core.rule import Accepted, Tree
from specsim.course.exercise import Exercise, Mistake


def follow(
    tree: Tree, prob_NV: torch.Tensor, draft_prob_NV: None, uniforms: list[float], final_uniform: float
) -> Accepted:
    """Draw the target's token after every node of the path, and follow the draft that equals it.

    prob_NV: the target's distribution after every node. draft_prob_NV: None, as the drafts were not drawn.
    """
    # begin answer
    path = [0]
    while True:
        token = inverse_cdf(prob_NV[path[-1]], uniforms[len(path) - 1])
        equal = [child for child in tree.acceptable_children(path) if tree.tokens[child] == token]
        if not equal:
            return Accepted(path, token)
        path.append(equal[0])
    # end answer


def inverse_cdf(weights: torch.Tensor, uniform: float) -> int:
    """Draw a token with these weights, as specsim.reference.sampling.inverse_cdf does."""
    from specsim.reference import sampling

    return sampling.inverse_cdf(weights, uniform)


def _shared(
    tree: Tree, prob_NV: torch.Tensor, _draft_prob_NV: None, uniforms: list[float], final_uniform: float
) -> Accepted:
    return follow(tree, prob_NV, None, uniforms[:1] * len(uniforms), final_uniform)


def _drawn_again(
    tree: Tree, prob_NV: torch.Tensor, _draft_prob_NV: None, uniforms: list[float], final_uniform: float
) -> Accepted:
    path, _ = follow(tree, prob_NV, None, uniforms, final_uniform)
    return Accepted(path, inverse_cdf(prob_NV[path[-1]], final_uniform))


def _walk(tree: Tree, prob_NV: torch.Tensor, uniforms: list[float] | None, children: Callable[..., Any]) -> Accepted:
    """Follow equal drafts among these children of a path; uniforms None: those of the most probable tokens."""
    path = [0]
    while True:
        prob_V = prob_NV[path[-1]]
        token = int(prob_V.argmax()) if uniforms is None else inverse_cdf(prob_V, uniforms[len(path) - 1])
        equal = [child for child in children(path) if tree.tokens[child] == token]
        if not equal:
            return Accepted(path, token)
        path.append(equal[0])


def _first_child(
    tree: Tree, prob_NV: torch.Tensor, _draft_prob_NV: None, uniforms: list[float], _final_uniform: float
) -> Accepted:
    return _walk(tree, prob_NV, uniforms, lambda path: list(tree.acceptable_children(path))[:1])


def _beyond_limit(
    tree: Tree, prob_NV: torch.Tensor, _draft_prob_NV: None, uniforms: list[float], _final_uniform: float
) -> Accepted:
    return _walk(tree, prob_NV, uniforms, lambda path: tree.children(path[-1]))


def _most_probable(
    tree: Tree, prob_NV: torch.Tensor, _draft_prob_NV: None, _uniforms: list[float], final_uniform: float
) -> Accepted:
    path = [0]
    while True:
        best = int(prob_NV[path[-1]].argmax())
        equal = [child for child in tree.acceptable_children(path) if tree.tokens[child] == best]
        if not equal:
            return Accepted(path, inverse_cdf(prob_NV[path[-1]], final_uniform))
        path.append(equal[0])


def _one_draft_only(
    tree: Tree, prob_NV: torch.Tensor, _draft_prob_NV: None, uniforms: list[float], _final_uniform: float
) -> Accepted:
    return _walk(tree, prob_NV, uniforms, lambda path: tree.acceptable_children(path) if len(path) == 1 else [])


def _greedy(
    tree: Tree, prob_NV: torch.Tensor, _draft_prob_NV: None, _uniforms: list[float], _final_uniform: float
) -> Accepted:
    return _walk(tree, prob_NV, None, tree.acceptable_children)


def proved(rule: Callable[..., Any], case: str) -> dict[str, Any]:
    """Enumerate a rule for given drafts exactly, on one of the package's own cases."""
    from specsim.core.rule import AcceptanceRule
    from specsim.correctness.exact.cases import RULE_CASES
    from specsim.correctness.exact.rule_distribution import Broken, NotCertified, rule_distribution

    chosen = next(each for each in RULE_CASES["best"] if each.name == case)
    try:
        exact = rule_distribution(AcceptanceRule("answer", "best", rule), chosen).exact
    except Broken as error:
        result = error.args[0].result
        if "NotImplementedError" in result:
            raise NotImplementedError from None
        raise RuntimeError(result) from None
    except NotCertified as error:
        raise RuntimeError(f"{error}; compute with the values as they are given") from None
    return {"a distance from the target of": exact.total_variation(chosen), "accepted drafts of": exact.accepted}


FOLLOW = Exercise(
    "15-1",
    "Write `follow`, a rule for drafts that were not drawn, but chosen: the drafter's best tokens. Begin at the root, "
    "node 0. At a node of depth d, draw the target's token with `inverse_cdf(prob_NV[node], uniforms[d])`. If an "
    "acceptable child holds this token, go on there. Otherwise the round ends with it. Return `Accepted(path, bonus)`: "
    "the nodes from the root on, and the token after them.\n\n"
    "The check enumerates your rule on cases of `certify`. Its distance from the target must be 0, and it must accept "
    "as many drafts as this description allows.\n\n"
    "Hint: a node may have several children. `tree.acceptable_children(path)` lists those children of the path's last "
    "node that the length limit of the request allows. `tree.tokens[child]` is the token of a child.",
    follow,
    (
        ("2 tokens, no draft",),
        ("2 tokens, 1 given draft",),
        ("2 tokens, both given",),
        ("2 tokens, a given chain of 2 drafts",),
        ("3 tokens, 3 given drafts",),
        ("4 tokens, a given tree of 6 drafts, 0 within max_len",),
    ),
    (
        Mistake(
            _shared,
            "One uniform decides at every depth. An accepted draft says that this uniform was in the draft's part, so "
            "the tokens after it depend on that.",
        ),
        Mistake(
            _drawn_again,
            "The last token is drawn a second time. Where the first draw equalled no child, the second one may equal a "
            "child, and the tokens of drafts come out too often.",
        ),
        Mistake(
            _first_child,
            "Only the first child is compared. The distribution is right, but drafts that could be accepted are lost.",
        ),
        Mistake(
            _beyond_limit,
            "The path goes beyond the length limit of the request: use tree.acceptable_children(path).",
        ),
        Mistake(
            _most_probable,
            "That follows the target's most probable token. Under sampling the other tokens must come out too.",
        ),
        Mistake(
            _one_draft_only,
            "The round ends after one draft. The distribution is right, but deeper drafts are never accepted: repeat "
            "the step at the accepted node.",
        ),
        Mistake(
            _greedy,
            "No uniform is used: every token is the target's most probable one. That is greedy decoding; draw each "
            "token with `inverse_cdf`.",
        ),
    ),
    "Every token is drawn from the target with a uniform of its own, so the text follows the target's distribution. "
    "The drafts only decide how many of the tokens come out of one round.",
    proved,
)
