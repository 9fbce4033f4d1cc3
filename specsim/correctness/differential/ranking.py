"""Was a ranking right? Of logits that are known in two precisions, or of the very scores that were ranked."""

import torch

from specsim.correctness.differential.budget import budget
from specsim.correctness.differential.comparison import Comparison, Trio
from specsim.correctness.differential.divergence import Mismatch


def compare_ranking(
    check: Comparison,
    name: str,
    chosen: Trio[list[int]],
    reference_V: torch.Tensor,
    exact_V: torch.Tensor,
    noise: float,
) -> None:
    """The k best of values that the fast column does not show: place by place it may differ from exact's by noise.

    Two values, each off by at most `noise`, change places only if they lie within twice that. Values that are equal in
    both precisions are equal by construction, and then the lower index comes first, whatever the rounding.
    """
    for place, (found, best) in enumerate(zip(chosen.fast, chosen.exact, strict=True)):
        margin = abs(float(exact_V[found] - exact_V[best])) if found != best else 0.0
        overtaken = _equals_before(found, reference_V, exact_V) - set(chosen.fast[:place])
        repeated = found in chosen.fast[:place]
        if repeated or overtaken or not margin <= 2 * noise:
            raise Mismatch(name, best, found, place)
    check.tally.exercised["ties"] += any(_is_tied(token, reference_V, exact_V) for token in chosen.exact)
    check.tally.fields[name] += 1
    check.decided(chosen.fast == chosen.exact == chosen.reference)


def compare_drafts(
    check: Comparison,
    name: str,
    drafts: Trio[torch.Tensor],
    reference_LV: torch.Tensor,
    exact_LV: torch.Tensor,
    draft_ids: torch.Tensor,
) -> None:
    """The K drafts of every lane, target ids i64 [L, K], against the lanes' logits [L, draft V].

    draft_ids: the draft id of every target id, -1 for a token that cannot be drafted.
    """
    noise = budget(reference_LV, exact_LV, check.eps)
    for lane, (reference_V, exact_V) in enumerate(zip(reference_LV, exact_LV, strict=True)):
        tokens = Trio(*(each[lane].tolist() for each in drafts))
        for token, expected in zip(tokens.fast, tokens.reference, strict=True):
            if not (0 <= token < len(draft_ids) and draft_ids[token] >= 0):
                raise Mismatch(name, expected, token, lane)
        ids = tokens.map(lambda chosen: draft_ids[chosen].tolist())
        compare_ranking(check, name, ids, reference_V, exact_V, noise)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the `count` largest, largest first, equals in ascending order."""
    return torch.sort(scores, descending=True, stable=True).indices[:count]


def log_scores(scores: torch.Tensor, score: str = "prob") -> torch.Tensor:
    """Scores as sums of logarithms, float64: there rounding is as large for a small probability as for a large one, and
    a wrong small one shows.
    """
    return scores.double().log() if score == "prob" else scores.double()


def _equals_before(index: int, reference_V: torch.Tensor, exact_V: torch.Tensor) -> set[int]:
    """Lower indices whose value is the same in both precisions."""
    equal = (reference_V[:index] == reference_V[index]) & (exact_V[:index] == exact_V[index])
    return set(equal.nonzero().flatten().tolist())


def _is_tied(index: int, reference_V: torch.Tensor, exact_V: torch.Tensor) -> bool:
    return int(((reference_V == reference_V[index]) & (exact_V == exact_V[index])).sum()) > 1
