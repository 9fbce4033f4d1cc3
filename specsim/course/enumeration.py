"""Exact enumeration of answers that are acceptance rules, for exercises that observe it."""

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from specsim.core.rule import Accept
    from specsim.core.verifiers import Drafts
    from specsim.correctness.exact.cases import ExactCase

Weights = tuple[int, ...]
Rule = Callable[..., Any]


def inverse_cdf(weights: torch.Tensor, uniform: float) -> int:
    """Draw a token with these weights, as specsim.reference.sampling.inverse_cdf does."""
    from specsim.reference import sampling

    return sampling.inverse_cdf(weights, uniform)


def with_one_draft(rule: Rule, target: Weights, drafter: Weights) -> dict[str, Fraction]:
    """Enumerate a rule for one draft that the drafter draws; the two models are given by their weights."""
    case, prob_NV = _case(target, drafter, 1)
    _, _ = rule(0, *prob_NV, 0.5, 0.5)  # an exception is the reader's to see
    accept = _below_root(rule, lambda drafts, target_V, draft_V, uniforms: (drafts[0], target_V, draft_V, uniforms[0]))
    return _figures(accept, "sampled", case, "a share of kept drafts of")


def with_given_drafts(rule: Rule, target: Weights, drafts: list[int]) -> dict[str, Fraction]:
    """Enumerate a rule for given drafts below the root; the target is given by its weights."""
    case, prob_NV = _case(target, target, len(drafts), tuple(drafts))
    _, _ = rule(list(drafts), prob_NV[0], 0.5, 0.5)
    accept = _below_root(rule, lambda drafts, target_V, _, uniforms: (drafts, target_V, uniforms[0]))
    return _figures(accept, "best", case, "a share of accepted drafts of")


def with_drawn_siblings(rule: Rule, target: Weights, drafter: Weights, num_siblings: int) -> dict[str, Fraction]:
    """Enumerate a rule for siblings that the drafter draws; the two models are given by their weights."""
    case, prob_NV = _case(target, drafter, num_siblings)
    _, _ = rule([drafter.index(max(drafter))] * num_siblings, *prob_NV, [0.5] * num_siblings, 0.5)
    accept = _below_root(rule, lambda drafts, target_V, draft_V, uniforms: (drafts, target_V, draft_V, uniforms[1:]))
    return _figures(accept, "siblings", case, "a share of accepted drafts of")


def on_rule_case(rule: Rule, case: str) -> dict[str, Fraction]:
    """Enumerate a rule for given drafts on one of the package's own cases."""
    from specsim.correctness.exact.cases import RULE_CASES

    (rule_case,) = (row for row in RULE_CASES["best"] if row.name == case)
    return _figures(rule, "best", rule_case, "accepted drafts of")


def _case(target: Weights, drafter: Weights, size: int, drafts: Weights | None = None) -> tuple["ExactCase", Any]:
    """Make a case of drafts below the root, and the distributions of target and drafter there."""
    from specsim.correctness.exact.cases import ExactCase, ExactModel
    from specsim.correctness.exact.verifier import rows

    case = ExactCase("drafts", ExactModel((target,)), ExactModel((drafter,)), (-1, *[0] * size), drafts)
    return case, rows([case.target(()), case.draft(())])


def _below_root(rule: Rule, arguments: Callable[..., Any]) -> "Accept":
    """Make an acceptance rule from an exercise's, whose arguments but the final uniform a function makes."""
    from specsim.core.rule import Accepted

    def accept(tree: Any, prob_NV: Any, draft_prob_NV: Any, uniforms: list[float], final_uniform: float) -> Accepted:
        drafts = list(tree.tokens[1:])
        draft_prob_V = None if draft_prob_NV is None else draft_prob_NV[0]
        is_accepted, token = rule(*arguments(list(drafts), prob_NV[0], draft_prob_V, uniforms), final_uniform)
        if not is_accepted:
            return Accepted([0], token)
        if token not in drafts:
            raise ValueError(f"token {token} is accepted, but it is no draft")
        node = 1 + drafts.index(token)
        return Accepted([0, node], inverse_cdf(prob_NV[node], final_uniform))

    return accept


def _figures(accept: "Accept", drafts: "Drafts", case: "ExactCase", share: str) -> dict[str, Fraction]:
    """Enumerate a rule exactly on a case."""
    from specsim.core.rule import AcceptanceRule
    from specsim.correctness.exact.rule_distribution import Broken, NotCertified, rule_distribution

    try:
        exact = rule_distribution(AcceptanceRule("answer", drafts, accept), case).exact
    except Broken as error:
        result = error.args[0].result
        if "NotImplementedError" in result:  # a starter's
            raise NotImplementedError from None
        raise RuntimeError(result) from None
    except NotCertified as error:
        allowed = "compute with the values as they are given: compare, +, -, *, /, clamp, sum, clone"
        raise RuntimeError(f"{error}; {allowed}") from None
    return {"a distance from the target of": exact.total_variation(case), share: exact.accepted}
