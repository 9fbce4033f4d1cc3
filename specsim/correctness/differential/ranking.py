"""Rankings checked by logits known in two precisions, or by the ranked scores themselves."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from specsim.correctness.differential.budget import budget, log_prob_budget
from specsim.correctness.differential.comparison import FieldChecks, Mismatch, Trio
from specsim.correctness.differential.step import ComparedRequest


class LogitsPair(NamedTuple):
    """Logits of the same rows in two precisions; those of the implementation under test are not needed."""

    reference: torch.Tensor
    exact: torch.Tensor

    def log_noise(self, request: ComparedRequest[Any]) -> float:
        """Bound the error of a draft's log probability at the drafts' temperature."""
        temperature = request.temperature if request.config.is_sampled else 1.0
        return log_prob_budget(self.reference, self.exact, request.check.eps) / (temperature or 1.0)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Values known in two precisions, ranked from the best down."""

    reference_V: torch.Tensor
    exact_V: torch.Tensor
    noise: float  # bound on the error of a value

    def compare(self, check: FieldChecks, name: str, chosen: Trio[list[int]]) -> None:
        """Require the best indices, best first.

        At each place the value may differ from that of exact's choice by `noise`: two values, each off by at most
        `noise`, change places only if they lie within twice that. Values that are equal in both precisions are equal by
        construction; of these the lower index comes first, whatever the rounding.
        """
        for rank, (choice, best) in enumerate(zip(chosen.fast, chosen.exact, strict=True)):
            margin = abs(float(self.exact_V[choice] - self.exact_V[best])) if choice != best else 0.0
            before = chosen.fast[:rank]
            overtaken = {index for index in self._equals(choice) if index < choice}.difference(before)
            if choice in before or overtaken or not margin <= 2 * self.noise:
                raise Mismatch(name, best, choice, rank)
        check.tally.coverage["ties"] += any(len(self._equals(index)) > 1 for index in chosen.exact)
        check.tally.fields[name] += 1
        check.decided(chosen)

    def _equals(self, index: int) -> list[int]:
        """List the indices whose values equal this one in both precisions."""
        equal = (self.reference_V == self.reference_V[index]) & (self.exact_V == self.exact_V[index])
        return equal.nonzero().flatten().tolist()


def compare_drafts(request: ComparedRequest[Any], name: str, drafts: Trio[torch.Tensor], logits: LogitsPair) -> None:
    """Compare the K drafts of every lane, target ids i64 [L, K], with the lanes' logits [L, draft V]."""
    draft_ids = request.step.draft_ids
    noise = budget(*logits, request.check.eps)
    for lane, rows in enumerate(zip(*logits, strict=True)):
        tokens = drafts.map(lambda lanes, i=lane: lanes[i].tolist())
        for token, expected in zip(tokens.fast, tokens.reference, strict=True):
            if not (0 <= token < len(draft_ids) and draft_ids[token] >= 0):
                raise Mismatch(name, expected, token, lane)
        ids = tokens.map(lambda chosen: draft_ids[chosen].tolist())
        Ranking(*rows, noise).compare(request.check, name, ids)


def log_scores(scores: torch.Tensor, score: str = "prob") -> torch.Tensor:
    """Convert scores to sums of logarithms, float64, in which wrong small probabilities show as much as large ones."""
    return scores.double().log() if score == "prob" else scores.double()
