"""Comparison of a step's results, phase by phase and request by request."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from specsim.correctness.differential.comparison import Mismatch, WithinRoundingError
from specsim.correctness.differential.draft import compare_draft
from specsim.correctness.differential.draft_input import compare_draft_extend, compare_prefill, prefill_logits
from specsim.correctness.differential.kv import compare_tables, note_other_choices
from specsim.correctness.differential.slots import compare_untouched, lane_slots, permitted_writes
from specsim.correctness.differential.step import ComparedRequest, ComparedStep
from specsim.correctness.differential.verify import adjusted_logits, compare_verify

BY_ROW = frozenset(f"draft_extend_input.{name}" for name in ("input_ids", "positions", "cache_locations", "hidden"))
# By phase: what every request's comparison needs, computed once for the step, and the comparison.
COMPARISONS: dict[str, tuple[Callable[[ComparedStep], Any], Callable[[ComparedRequest, Any], None]]] = {
    "prefill": (prefill_logits, compare_prefill),
    "draft": (lane_slots, compare_draft),
    "verify": (adjusted_logits, compare_verify),
    "draft_extend": (lambda step: step.extend_input, compare_draft_extend),
}


class StepDifference(NamedTuple):
    """The first difference of a request, or of a whole step."""

    phase: str
    request: int | None  # place in the batch
    mismatch: Mismatch


def compare_step(step: ComparedStep, not_compared: set[int]) -> Iterator[StepDifference]:
    """Yield every request's first difference.

    not_compared: places of requests that diverged from the reference by rounding. They are skipped, and requests that
    diverge in this step are added.
    """
    diverged_before = set(not_compared)
    wrong = set()
    tally = step.check.tally
    for phase, states in step.outputs.items():
        if mismatch := _mismatch(step.check.layout, "", states.reference, states.fast, BY_ROW):
            yield StepDifference(phase, None, mismatch)
            return
        prepare, compare = COMPARISONS[phase]
        prepared = prepare(step)
        for index in range(step.batch.size):
            if index in not_compared or index in wrong:
                tally.not_compared[phase] += 1
                continue
            request = ComparedRequest(step, index, states)
            try:
                note_other_choices(request)
                compare(request, prepared)
                tally.compared[phase] += 1
            except WithinRoundingError:
                tally.within_rounding_error += 1
                tally.not_compared[phase] += 1
                not_compared.add(index)
            except Mismatch as mismatch:
                wrong.add(index)
                yield StepDifference(phase, index, mismatch)
    if step.pools_before is None:
        return
    if mismatch := _mismatch(compare_tables, step, not_compared | wrong):
        yield StepDifference(step.last, None, mismatch)
    for writes in permitted_writes(step, not_compared) if not diverged_before else ():
        if mismatch := _mismatch(compare_untouched, step, writes):
            yield StepDifference(writes.phase, None, mismatch)


def _mismatch(compare: Callable[..., None], *arguments: Any) -> Mismatch | None:
    try:
        compare(*arguments)
    except Mismatch as mismatch:
        return mismatch
    return None
