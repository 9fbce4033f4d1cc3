"""Exact enumeration of answers that are acceptance rules, for exercises that observe it."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from specsim.core.rule import Accept
    from specsim.correctness.exact.cases import ExactCase

Weights = tuple[int, ...]


def inverse_cdf(weights: torch.Tensor, uniform: float) -> int:
    """Draw a token with these weights, as specsim.reference.sampling.inverse_cdf does."""
    from specsim.reference import sampling

    return sampling.inverse_cdf(weights, uniform)


def with_given_drafts(rule: Callable[..., Any], target: Weights, drafts: list[int]) -> dict[str, Fraction]:
    """Enumerate a rule for given drafts below the root; the target is given by its weights."""
    from specsim.correctness.exact.cases import ExactCase, ExactModel
    from specsim.correctness.exact.verifier import rows

    model = ExactModel((target,))
    case = ExactCase("given drafts", model, model, (-1, *(0 for _ in drafts)), tuple(drafts))
    _, _ = rule(list(drafts), rows([model(())])[0], 0.5, 0.5)  # an exception is the reader's to see

    def accept(_tree: Any, prob_NV: Any, _draft_prob: Any, uniforms: list[float], final: float) -> Any:
        return _ended(rule(list(drafts), prob_NV[0], uniforms[0], final), drafts, prob_NV, final)

    return _enumerated(accept, "best", case)


def with_drawn_siblings(
    rule: Callable[..., Any], target: Weights, drafter: Weights, num_siblings: int
) -> dict[str, Fraction]:
    """Enumerate a rule for siblings that the drafter draws; the two models are given by their weights."""
    from specsim.correctness.exact.cases import ExactCase, ExactModel
    from specsim.correctness.exact.verifier import rows

    case = ExactCase("siblings", ExactModel((target,)), ExactModel((drafter,)), (-1, *(0 for _ in range(num_siblings))))
    target_V, draft_V = rows([case.target(()), case.draft(())])
    likely = max(range(len(drafter)), key=lambda token: drafter[token])
    _, _ = rule([likely] * num_siblings, target_V, draft_V, [0.5] * num_siblings, 0.5)  # the reader sees its exception

    def accept(tree: Any, prob_NV: Any, draft_prob: Any, uniforms: list[float], final: float) -> Any:
        drafts = list(tree.tokens[1:])
        found = rule(list(drafts), prob_NV[0], draft_prob[0], list(uniforms[1:]), final)
        return _ended(found, drafts, prob_NV, final)

    return _enumerated(accept, "siblings", case)


def _enumerated(accept: "Accept", drafts: Literal["best", "siblings"], case: "ExactCase") -> dict[str, Fraction]:
    """Enumerate a rule exactly on a case."""
    from specsim.core.rule import AcceptanceRule
    from specsim.correctness.exact.rule_distribution import Broken, NotCertified, rule_distribution

    try:
        exact = rule_distribution(AcceptanceRule("answer", drafts, accept), case).exact
    except Broken as error:
        raise RuntimeError(error.args[0].result) from None
    except NotCertified as error:
        allowed = "compute with the values as they are given: compare, +, -, *, /, clamp, sum, clone"
        raise RuntimeError(f"{error}; {allowed}") from None
    return {
        "a distance from the target of": exact.total_variation(case),
        "a share of accepted drafts of": exact.accepted,
    }


def _ended(answer: tuple[bool, int], tokens: Sequence[int], prob_NV: Any, final: float) -> Any:
    """Make the result of a rule whose drafts, all below the root, have these tokens."""
    from specsim.core.rule import Accepted

    is_accepted, token = answer
    if not is_accepted:
        return Accepted([0], token)
    if token not in tokens:
        raise ValueError(f"token {token} is accepted, but it is no draft")
    node = 1 + list(tokens).index(token)
    return Accepted([0, node], inverse_cdf(prob_NV[node], final))
