"""Comparison of a step's results, phase by phase and request by request, and of the slots that it may write."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from specsim.core.columns import reserve_lanes
from specsim.core.drafter import columns_ahead
from specsim.core.pool import KVBuffer, lane_columns, tail_columns
from specsim.correctness.differential.comparison import Mismatch, present
from specsim.correctness.differential.draft import compare_draft
from specsim.correctness.differential.draft_input import compare_draft_extend, compare_prefill, prefill_logits
from specsim.correctness.differential.kv import compare_tables, has_other_choices, owner_of
from specsim.correctness.differential.step import ComparedRequest, ComparedStep
from specsim.correctness.differential.verify import adjusted_logits, compare_verify

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Writes(NamedTuple):
    """Slots of one buffer of the pools under test that may change within a part of a step."""

    phase: str  # it ends the part
    buffer: str
    before: KVBuffer
    after: KVBuffer
    slots: list[torch.Tensor]


def permitted_writes(step: ComparedStep, not_compared: set[int]) -> Iterator[Writes]:
    """Yield the slots that the step may write.

    In graph mode `round` the draft buffer is given twice: for the draft phase and for the phases after it.
    """
    before = present("pools before the step", step.pools_before)
    after = step.pools.fast
    target, draft = _written_slots(step, not_compared)
    yield Writes(step.last, "target", before.target, after.target, target)
    if before.draft is None or after.draft is None:
        return
    entered = before.draft
    drafted = step.drafted.fast if "draft" in step.outputs else None
    if drafted is not None:
        yield Writes("draft", "draft", entered, drafted, lane_slots(step))
        entered = drafted
    if step.last != "draft":
        yield Writes(step.last, "draft", entered, after.draft, draft)


def _written_slots(step: ComparedStep, not_compared: set[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """List slots of the target and of the draft buffer that phases other than draft may write.

    For a request that is not compared these are all slots that its phases may ever write.
    """
    target = []
    draft = []
    config = step.config
    ahead = columns_ahead(step.drafter)
    lookahead = step.drafter.lookahead
    for index in range(step.batch.size):
        request = ComparedRequest(step, index, step.entered)
        length = request.length
        is_out = index in not_compared
        if "prefill" in step.outputs:
            start = int(step.entered.reference.start_lens[index])
            target.append(column_slots(request, start, length))
            draft.append(column_slots(request, max(0, start - lookahead), length + ahead))
        if "verify" in step.outputs:
            all_slots = column_slots(request, length, length + config.num_draft_tokens)
            target.append(all_slots if is_out else tree_slots(request))
        if "draft_extend" in step.outputs:
            all_slots = column_slots(request, length, length + config.num_steps + 1 + ahead)
            draft.append(all_slots if is_out else extend_slots(request))
            draft.append(column_slots(request, request.end, request.end + step.drafter.num_mask_rows))
            draft.append(column_slots(request, max(0, length - lookahead), length))
    return target, draft


def lane_slots(step: ComparedStep) -> list[torch.Tensor]:
    """List each request's slots of draft lanes and of the tail copies of lanes 1..K-1, or those of its block.

    There are none without draft KV, nor of a drafter that makes all drafts before the draft phase.

    Under release `round` the lanes are already released when the phase ends, so they are allocated again in a copy of
    the page allocator from before the phase.
    """
    if step.pools.reference.draft is None or step.entered.reference.has_all_drafts:
        return []
    config = step.config
    bonus_columns = step.drafter.bonus_columns
    books = deepcopy(step.tables_before)
    block_rows = step.drafter.block_rows
    reserve_lanes(
        books, step.batch.req_pool_indices.tolist(), step.batch.seq_lens.tolist(), config, bonus_columns, block_rows
    )
    slots = []
    for row, length in step.batch.rows_and_lens:
        if block_rows:
            slots.append(books.slots(row, torch.arange(length, min(length + block_rows, config.length_limit))))
            continue
        first = length + bonus_columns
        steps = max(0, min(config.num_steps - 1, config.length_limit - first))
        lanes = lane_columns(first, config)[:, :steps]
        tails = tail_columns(first, config)[1:]
        slots.append(books.slots(row, torch.cat([lanes.flatten(), tails.flatten()])))
    return slots


def tree_slots(request: ComparedRequest[Any]) -> torch.Tensor:
    """List the slots of the tree's nodes, and those of the columns that the accepted path is moved to."""
    nodes = request.step.trees.reference.cache_locations[request.nodes]
    return torch.cat([nodes[nodes >= 0], request.slots(torch.arange(request.length, request.end))])


def extend_slots(request: ComparedRequest[Any]) -> torch.Tensor:
    """List the slots that draft-extend writes, padding rows of `fixed` included."""
    rows = present("draft_extend_input", request.step.extend_input)
    low, high = rows.row_starts[request.index : request.index + 2].tolist()
    slots = rows.cache_locations[low:high]
    return slots[slots >= 0]


def column_slots(request: ComparedRequest[Any], low: int, high: int) -> torch.Tensor:
    """List the slots that columns low..high-1 had before the step or have after it."""
    both = (request.step.tables_before, request.step.pools.reference)
    slots = torch.cat([pools.req_to_token[request.row, low:high] for pools in both])
    return slots[slots >= 0].unique()


def compare_untouched(step: ComparedStep, writes: Writes) -> None:
    """Require every other slot of the buffer to keep its bits."""
    changed = _changed(writes.before, writes.after)
    for slots in writes.slots:
        changed[slots] = False
    if changed.any():
        slot = int(changed.nonzero()[0])
        raise Mismatch(f"stray write, {writes.buffer} pool", "unchanged", owner_of(step.pools.reference, slot), slot)
    step.check.tally.fields[f"{writes.buffer} slots untouched"] += 1


def _changed(before: KVBuffer, after: KVBuffer) -> torch.Tensor:
    """Mark changed slots, bool [slots]; NaN are compared as bits too."""
    bits = _BITS[before.keys.itemsize]
    pairs = [(before.keys, after.keys)] + ([] if before.values_in_keys else [(before.values, after.values)])
    changed = [(old.view(bits) != new.view(bits)).any(-1).any(-1).any(0) for old, new in pairs]
    return torch.stack(changed).any(0).cpu()


BY_ROW = frozenset(f"draft_extend_input.{name}" for name in ("input_ids", "positions", "cache_locations", "hidden"))
# By phase: what every request's comparison needs, computed once for the step, and the comparison.
COMPARISONS: dict[str, tuple[Callable[[ComparedStep], Any], Callable[[ComparedRequest, Any], bool]]] = {
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
                is_same = not has_other_choices(request) and compare(request, prepared)
            except Mismatch as mismatch:
                wrong.add(index)
                yield StepDifference(phase, index, mismatch)
                continue
            if is_same:
                tally.compared[phase] += 1
            else:
                tally.within_rounding_error += 1
                tally.not_compared[phase] += 1
                not_compared.add(index)
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
