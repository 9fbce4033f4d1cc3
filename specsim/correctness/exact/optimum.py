"""Largest acceptance of any lossless rule on a case: a linear programme with a bound in fractions."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from specsim.correctness.exact.cases import Draw, ExactCase, Text, draws, text_prob, texts

_TOLERANCE = 1e-9  # of HiGHS
_MOST_DENOMINATOR = 10**6  # prices of a vertex are short fractions


class PathEnd(NamedTuple):
    """A node at which a path may end, and the token after it."""

    gain: int  # accepted drafts
    after: list[tuple[Text, Fraction]]  # the texts that may follow, with their probabilities


def optimum(case: ExactCase) -> Fraction:
    """Compute the largest expected number of accepted drafts.

    The maximum is over all rules that know the drafted tree and both models, keep a path of the tree, add one token and
    leave all later ones to the target, so that S + 1 tokens have exactly the target's distribution. With one step this
    is the maximal coupling, Σ min(p, q), and with siblings SpecTr's transport (arXiv 2310.15141).

    For any prices z of texts, Σ p(text) z(text) + Σ P(tree) max (drafts of an end - mean price after it) bounds the
    accepted drafts, because a rule has to write every text as often as the target does. HiGHS finds prices in float64.
    Their bound is computed in fractions and must equal the value of the primal solution.
    """
    drafted = list(draws(case))
    written = texts(case.target.vocab_size, case.num_steps + 1)
    ends = [list(_ends(case, draw)) for draw in drafted]
    value, prices = _solve(case, drafted, written, ends)
    exact = dict(zip(written, (Fraction(price).limit_denominator(_MOST_DENOMINATOR) for price in prices), strict=True))
    bound = sum((text_prob(case.target, text) * price for text, price in exact.items()), Fraction(0))
    for draw, draw_ends in zip(drafted, ends, strict=True):
        bound += draw.prob * max(end.gain - sum(prob * exact[text] for text, prob in end.after) for end in draw_ends)
    if abs(float(bound) - value) > _TOLERANCE:
        raise ArithmeticError(f"{case.name}: the bound {float(bound)} of the prices is not the solution's {value}")
    return bound


def _ends(case: ExactCase, draw: Draw) -> Iterator[PathEnd]:
    """Yield every node at which a path may end, with every token after it."""
    for node in draw.ends:
        for token in range(case.target.vocab_size):
            tokens = (*draw.text(node), token)
            rests = texts(case.target.vocab_size, case.num_steps + 1 - len(tokens))
            after = [(*tokens, *rest) for rest in rests]
            yield PathEnd(len(tokens) - 1, [(text, text_prob(case.target, text, len(tokens))) for text in after])


def _solve(
    case: ExactCase, drafted: Sequence[Draw], written: Sequence[Text], ends: Sequence[Sequence[PathEnd]]
) -> tuple[float, list[float]]:
    """Solve for the value of the optimum and the prices of the texts.

    A variable is the probability that a tree is drafted and ends in one way.
    """
    from scipy.optimize import linprog
    from scipy.sparse import coo_array

    rows = {text: row for row, text in enumerate(written, len(drafted))}
    gains = []
    entries = []
    for index, draw_ends in enumerate(ends):
        for end in draw_ends:
            entries.append((index, len(gains), 1.0))
            entries.extend((rows[text], len(gains), float(prob)) for text, prob in end.after if prob)
            gains.append(-end.gain)
    sums = [*(draw.prob for draw in drafted), *(text_prob(case.target, text) for text in written)]
    row, column, values = zip(*entries, strict=True)
    matrix = coo_array((values, (row, column)), shape=(len(sums), len(gains))).tocsr()
    solved = linprog(gains, A_eq=matrix, b_eq=list(map(float, sums)), method="highs")
    if not solved.success:
        raise ArithmeticError(f"{case.name}: {solved.message}")
    return -solved.fun, [-price for price in solved.eqlin.marginals[len(drafted) :]]
