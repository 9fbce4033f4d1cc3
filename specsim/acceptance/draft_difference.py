"""Accepted drafts of two engines on the same prompts, where their texts say nothing of their drafters."""

from dataclasses import dataclass

from specsim.simulator.acceptance_record import AcceptanceRecord, Counts


@dataclass(frozen=True, slots=True)
class DraftDifference:
    """Comparison of the accepted drafts of two engines."""

    a: tuple[int, ...]  # rounds with drafts, then those that accepted at least 1, 2, ... or the accepted drafts
    b: tuple[int, ...]  # the same of the other engine
    request: int | None  # first request whose counts differ; None where they are equal or not counted by request
    says: str  # conclusion


def compare_drafts(a: AcceptanceRecord, b: AcceptanceRecord, texts_are_equal: bool) -> DraftDifference | None:
    """Compare the counts of two records; None where one has none.

    A verifier accepts drafts, so that a fault of a drafter changes no text. It shows in these counts alone.
    """
    if a.total is None or b.total is None:
        return None
    has_positions = bool(a.total.by_position and b.total.by_position)
    counts_a, counts_b = _row(a.total, has_positions), _row(b.total, has_positions)
    request = None
    if a.is_by_request and b.is_by_request and len(a.counts) == len(b.counts):
        both = enumerate(zip(a.counts, b.counts, strict=True))
        differing = (index for index, sides in both if len({_row(side, has_positions) for side in sides}) > 1)
        request = next(differing, None)
    if counts_a == counts_b and request is None:
        says = "equal counts of accepted drafts"
    elif texts_are_equal:
        says = (
            "only drafts differ: the texts are equal, so that target and verifier agree, and the drafters do not. More "
            "than a few rounds of difference are a fault of a drafter, its weights or its inputs"
        )
    else:
        says = "accepted drafts differ, which follows where texts do: compare prompts with equal texts"
    return DraftDifference(counts_a, counts_b, request, says)


def _row(counts: Counts, has_positions: bool) -> tuple[int, ...]:
    """List the rounds and the accepted drafts, without positions that no round accepted."""
    if not has_positions:
        return counts.rounds, counts.accepted_drafts
    return counts.rounds, *(count for count in counts.by_position if count)
