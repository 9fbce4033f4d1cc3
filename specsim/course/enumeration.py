"""Exact enumeration of answers that are acceptance rules, for exercises that observe it."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from specsim.core.rule import Accept, Accepted
    from specsim.correctness.exact.cases import ExactCase

Weights = tuple[int, ...]
Rule = Callable[..., Any]


def inverse_cdf(weights: torch.Tensor, uniform: float) -> int:
    """Draw a token with these weights, as specsim.reference.sampling.inverse_cdf does."""
    from specsim.reference import sampling

    return sampling.inverse_cdf(weights, uniform)


def with_one_draft(rule: Rule, target: Weights, drafter: Weights) -> dict[str, Fraction]:
    """Enumerate a rule for one draft that the drafter draws; the two models are given by their weights."""
    case = _case(target, drafter, 1)
    _, _ = rule(0, *_rows(case), 0.5, 0.5)  # an exception is the reader's to see

    def accept(tree: Any, prob_NV: Any, draft_prob: Any, uniforms: list[float], final: float) -> "Accepted":
        draft = tree.tokens[1]
        is_kept, token = rule(draft, prob_NV[0], draft_prob[0], uniforms[0], final)
        return _round_end((is_kept, draft if is_kept else token), [draft], prob_NV, final)

    return _figures(accept, "sampled", case, "a share of kept drafts of")


def with_given_drafts(rule: Rule, target: Weights, drafts: list[int]) -> dict[str, Fraction]:
    """Enumerate a rule for given drafts below the root; the target is given by its weights."""
    case = _case(target, target, len(drafts), tuple(drafts))
    _, _ = rule(list(drafts), _rows(case)[0], 0.5, 0.5)

    def accept(_tree: Any, prob_NV: Any, _draft_prob: Any, uniforms: list[float], final: float) -> "Accepted":
        return _round_end(rule(list(drafts), prob_NV[0], uniforms[0], final), drafts, prob_NV, final)

    return _figures(accept, "best", case)


def with_drawn_siblings(rule: Rule, target: Weights, drafter: Weights, num_siblings: int) -> dict[str, Fraction]:
    """Enumerate a rule for siblings that the drafter draws; the two models are given by their weights."""
    case = _case(target, drafter, num_siblings)
    likely = max(range(len(drafter)), key=lambda token: drafter[token])
    _, _ = rule([likely] * num_siblings, *_rows(case), [0.5] * num_siblings, 0.5)

    def accept(tree: Any, prob_NV: Any, draft_prob: Any, uniforms: list[float], final: float) -> "Accepted":
        drafts = list(tree.tokens[1:])
        verdict = rule(list(drafts), prob_NV[0], draft_prob[0], list(uniforms[1:]), final)
        return _round_end(verdict, drafts, prob_NV, final)

    return _figures(accept, "siblings", case)


def on_rule_case(rule: Rule, case: str) -> dict[str, Fraction]:
    """Enumerate a rule for given drafts on one of the package's own cases."""
    from specsim.correctness.exact.cases import RULE_CASES

    rule_case = next(row for row in RULE_CASES["best"] if row.name == case)
    return _figures(rule, "best", rule_case, "accepted drafts of")


def _case(target: Weights, drafter: Weights, num_drafts: int, drafts: tuple[int, ...] | None = None) -> "ExactCase":
    """Make a case of drafts below the root."""
    from specsim.correctness.exact.cases import ExactCase, ExactModel

    return ExactCase("drafts", ExactModel((target,)), ExactModel((drafter,)), (-1, *[0] * num_drafts), drafts)


def _rows(case: "ExactCase") -> torch.Tensor:
    """Make the distributions of target and drafter at the root."""
    from specsim.correctness.exact.verifier import rows

    return rows([case.target(()), case.draft(())])


def _figures(
    accept: "Accept",
    drafts: Literal["best", "siblings", "sampled"],
    case: "ExactCase",
    share: str = "a share of accepted drafts of",
) -> dict[str, Fraction]:
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


def _round_end(verdict: tuple[bool, int], drafts: Sequence[int], prob_NV: Any, final_uniform: float) -> "Accepted":
    """Make the result of a rule whose drafts, all below the root, have these tokens."""
    from specsim.core.rule import Accepted

    is_accepted, token = verdict
    if not is_accepted:
        return Accepted([0], token)
    if token not in drafts:
        raise ValueError(f"token {token} is accepted, but it is no draft")
    node = 1 + list(drafts).index(token)
    return Accepted([0, node], inverse_cdf(prob_NV[node], final_uniform))
