"""Exercises of notebook 03: speculative sampling."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import torch

from specsim.course.exercise import Exercise, Mistake

# A target and a drafter over three tokens, in eighths: ordinary, equal, opposed, and with nothing in common.
PAIRS = tuple(
    tuple([Fraction(weight, 8) for weight in row] for row in pair)
    for pair in (((5, 2, 1), (3, 1, 4)), ((2, 3, 3), (2, 3, 3)), ((1, 1, 6), (6, 1, 1)), ((0, 0, 8), (4, 4, 0)))
)
Probs = list[Fraction]


def accept_rate(target_prob: list[Fraction], draft_prob: list[Fraction]) -> Fraction:
    """Compute the probability that the draft is kept, over all drafts."""
    # begin answer
    return sum(map(min, target_prob, draft_prob), Fraction(0))
    # end answer


def _equal_draws(target_prob: Probs, draft_prob: Probs) -> Fraction:
    return sum((p * q for p, q in zip(target_prob, draft_prob, strict=True)), Fraction(0))


def _certain_drafts(target_prob: Probs, draft_prob: Probs) -> Fraction:
    return sum((q for p, q in zip(target_prob, draft_prob, strict=True) if p >= q), Fraction(0))


def _not_weighted(target_prob: Probs, draft_prob: Probs) -> Fraction:
    rates = [min(Fraction(1), p / q) for p, q in zip(target_prob, draft_prob, strict=True) if q]
    return sum(rates, Fraction(0)) / len(rates)


ACCEPT_RATE = Exercise(
    "03-1",
    "Write `accept_rate`. It receives the two distributions as lists of fractions, and returns the probability that "
    "the draft is kept. The drafter may give a token probability 0.\n\n"
    "Hint: the drafter proposes x with probability q(x), and the rule keeps it with probability min(1, p(x) / q(x)). "
    "Multiply, and look at the two cases of the minimum. Then no division remains.",
    accept_rate,
    PAIRS,
    (
        Mistake(
            _equal_draws,
            "Σ p·q is the probability that two independent draws are equal. The rule keeps more: where p(x) ≥ q(x) it "
            "keeps every draft x.",
        ),
        Mistake(
            _certain_drafts,
            "That counts only the drafts that are certain to be kept. Where p(x) < q(x) a draft is still kept with "
            "probability p(x) / q(x).",
        ),
        Mistake(
            _not_weighted,
            "That is the mean over tokens. A token that the drafter seldom proposes must count less: weight each "
            "token's probability of acceptance by q(x).",
        ),
    ),
    "q(x) · min(1, p(x) / q(x)) is min(q(x), p(x)). The sum over x is the overlap of the two distributions.",
)


def residual(target_prob: list[Fraction], draft_prob: list[Fraction]) -> list[Fraction]:
    """Compute the distribution of the token that replaces a rejected draft; p itself if no draft is ever rejected."""
    # begin answer
    weights = [max(p - q, Fraction(0)) for p, q in zip(target_prob, draft_prob, strict=True)]
    total = sum(weights)
    return [weight / total for weight in weights] if total else list(target_prob)
    # end answer


def _whole_target(target_prob: Probs, _draft_prob: Probs) -> Probs:
    return list(target_prob)


def _differences(target_prob: Probs, draft_prob: Probs) -> Probs:
    weights = [max(p - q, Fraction(0)) for p, q in zip(target_prob, draft_prob, strict=True)]
    return weights if any(weights) else list(target_prob)


def _both_signs(target_prob: Probs, draft_prob: Probs) -> Probs:
    weights = [abs(p - q) for p, q in zip(target_prob, draft_prob, strict=True)]
    total = sum(weights)
    return [weight / total for weight in weights] if total else list(target_prob)


RESIDUAL = Exercise(
    "03-2",
    "Write `residual`. It returns the distribution of the token that replaces a rejected draft, as a list of fractions "
    "that sum to 1. If target and drafter agree on every token, no draft is ever rejected; return the target's "
    "distribution then.\n\n"
    "Hint: token x must have probability p(x) in the end. Kept drafts already give it min(p(x), q(x)).",
    residual,
    PAIRS,
    (
        Mistake(
            _whole_target,
            "That is the target's own distribution. Tokens that the drafter likes too little get their share, but "
            "tokens that it likes too much are given out twice: once as kept drafts and once as replacements.",
        ),
        Mistake(
            _differences,
            "The weights are right, but they sum to the probability of a rejection. Divide by their sum, since a "
            "replacement is drawn only after a rejection.",
        ),
        Mistake(
            _both_signs,
            "Where q(x) > p(x) kept drafts alone give x its whole probability p(x). Such a token may never be the "
            "replacement: its weight is 0.",
        ),
    ),
    "Kept drafts give min(p, q) of the target's p. The rest is max(p - q, 0), and its sum is the probability of a "
    "rejection.",
)


def keep_or_replace(
    token: int, target_prob: torch.Tensor, draft_prob: torch.Tensor, uniform: float, final_uniform: float
) -> tuple[bool, int]:
    """Decide one draft: return whether it is kept, and the token that the round gives.

    The distributions are tensors; uniform and final_uniform are independent.
    """
    # begin answer
    if uniform * draft_prob[token] < target_prob[token]:
        return True, token
    weights = (target_prob - draft_prob).clamp(min=0)
    return False, inverse_cdf(weights, final_uniform)
    # end answer


def inverse_cdf(weights: torch.Tensor, uniform: float) -> int:
    """Draw a token with these weights, as specsim.reference.sampling.inverse_cdf does."""
    from specsim.reference import sampling

    return sampling.inverse_cdf(weights, uniform)


def _replace_from_target(
    token: int, target_prob: torch.Tensor, draft_prob: torch.Tensor, uniform: float, final_uniform: float
) -> tuple[bool, int]:
    if uniform * draft_prob[token] < target_prob[token]:
        return True, token
    return False, inverse_cdf(target_prob, final_uniform)


def _no_uniform(
    token: int, target_prob: torch.Tensor, draft_prob: torch.Tensor, _uniform: float, final_uniform: float
) -> tuple[bool, int]:
    if draft_prob[token] <= target_prob[token]:
        return True, token
    return False, inverse_cdf((target_prob - draft_prob).clamp(min=0), final_uniform)


def _uniform_twice(
    token: int, target_prob: torch.Tensor, draft_prob: torch.Tensor, uniform: float, _final_uniform: float
) -> tuple[bool, int]:
    return keep_or_replace(token, target_prob, draft_prob, uniform, uniform)


def _target_alone(
    _token: int, target_prob: Any, _draft_prob: torch.Tensor, _uniform: float, final_uniform: float
) -> tuple[bool, int]:
    return False, inverse_cdf(target_prob, final_uniform)


def enumerated(rule: Callable[..., Any], target: tuple[int, ...], drafter: tuple[int, ...]) -> dict[str, Fraction]:
    """Enumerate a rule for one draft exactly; the two models are given by their weights."""
    from specsim.core.rule import AcceptanceRule, Accepted
    from specsim.correctness.exact.cases import ExactCase, ExactModel
    from specsim.correctness.exact.rule_distribution import Broken, NotCertified, rule_distribution
    from specsim.correctness.exact.verifier import rows

    case = ExactCase("one draft", ExactModel((target,)), ExactModel((drafter,)), (-1, 0))
    target_V, draft_V = rows([case.target(()), case.draft(())])
    _, _ = rule(0, target_V, draft_V, 0.5, 0.5)  # an exception is the reader's to see

    def accept(tree: Any, prob_NV: Any, draft_prob_NV: Any, uniforms: list[float], final_uniform: float) -> Accepted:
        is_kept, token = rule(tree.tokens[1], prob_NV[0], draft_prob_NV[0], uniforms[0], final_uniform)
        return Accepted([0, 1], inverse_cdf(prob_NV[1], final_uniform)) if is_kept else Accepted([0], token)

    try:
        exact = rule_distribution(AcceptanceRule("answer", "sampled", accept), case).exact
    except Broken as error:
        raise RuntimeError(error.args[0].result) from None
    except NotCertified as error:
        allowed = "compute with the values as they are given: compare, +, -, *, /, clamp, sum"
        raise RuntimeError(f"{error}; {allowed}") from None
    return {"a distance from the target of": exact.total_variation(case), "a share of kept drafts of": exact.accepted}


KEEP_OR_REPLACE = Exercise(
    "03-3",
    "Write the rule itself, for one draft. Two independent uniforms decide: the first whether the draft is kept, the "
    "second which token replaces it. `inverse_cdf(weights, uniform)` draws a token; the weights need not sum to 1. For "
    "the residual's weights you may write `(target_prob - draft_prob).clamp(min=0)`.\n\n"
    "The check enumerates your rule exactly. Its distance from the target's distribution must be 0, and no such rule "
    "may keep more drafts than yours. It passes exact numbers in place of floats, so compute with the values as they "
    "are, without `float(...)` or `torch.tensor(...)`.",
    keep_or_replace,
    (((5, 2, 1), (3, 1, 4)), ((1, 1, 6), (6, 1, 1)), ((2, 3, 3), (2, 3, 3)), ((0, 0, 8), (4, 4, 0))),
    (
        Mistake(
            _replace_from_target,
            "The replacement is drawn from the whole target instead of the residual distribution, so tokens that the "
            "drafter likes come out too often.",
        ),
        Mistake(
            _no_uniform,
            "The uniform is not used: a draft with p(x) < q(x) is never kept, and a token that the drafter likes too "
            "much never comes out.",
        ),
        Mistake(
            _uniform_twice,
            "One uniform decides twice. After a rejection it is known to be large, so the replacement does not follow "
            "the residual distribution: its last tokens come out too often.",
        ),
        Mistake(
            _target_alone,
            "Every token is the target's own. That is lossless, but no draft is ever kept, so nothing is gained.",
        ),
    ),
    "The draft is kept if uniform · q(x) < p(x), which has probability min(1, p(x) / q(x)) and divides by nothing.",
    enumerated,
)

EXERCISES = (ACCEPT_RATE, RESIDUAL, KEEP_OR_REPLACE)
