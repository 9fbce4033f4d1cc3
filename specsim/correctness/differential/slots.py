"""KV and tables after a step: the slots that must have been written, those that must not, and their owners."""

from copy import deepcopy
from typing import Any

import torch

from specsim.core.columns import lane_columns, own_lanes, tail_columns
from specsim.core.pool import KVBuffer, KVPool
from specsim.correctness.differential.comparison import Mismatch, present
from specsim.correctness.differential.step import ComparedRequest, Step

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def written_slots(step: Step, left_out: set[int]) -> dict[str, list[torch.Tensor]]:
    """List by buffer the slots that the step may write; of a left-out request, all that its phases ever may."""
    target = []
    draft = []
    config = step.config
    if "draft" in step.outputs and step.pools.reference.draft is not None:
        draft += lane_slots(step)
    for index in range(step.batch.size):
        request = ComparedRequest(step, index, step.entered)
        length = request.length
        is_out = index in left_out
        if "prefill" in step.outputs:
            slots = column_slots(request, int(step.entered.reference.start_lens[index]), length)
            target.append(slots)
            draft.append(slots)
        if "verify" in step.outputs:
            whole = column_slots(request, length, length + config.num_draft_tokens)
            target.append(whole if is_out else tree_slots(request))
        if "draft_extend" in step.outputs:
            whole = column_slots(request, length, length + config.num_steps + 1)
            draft.append(whole if is_out else extend_slots(request))
    return {"target": target, "draft": draft}


def lane_slots(step: Step) -> list[torch.Tensor]:
    """List each request's slots of draft lanes and of the tail copies of lanes 1..K-1.

    Under release `round` lanes have been given back when the phase ends, so they are taken once more in a copy of the
    books from before it.
    """
    config = step.config
    books = deepcopy(step.tables_before)
    own_lanes(books, step.batch.req_pool_indices.tolist(), step.batch.seq_lens.tolist(), config)
    slots = []
    for row, length in step.batch.rows_and_lens:
        steps = max(0, min(config.num_steps - 1, config.length_limit - length))
        lanes = lane_columns(length, config)[:, :steps]
        tails = tail_columns(length, config)[1:]
        slots.append(books.slots(row, torch.cat([lanes.flatten(), tails.flatten()])))
    return slots


def tree_slots(request: ComparedRequest[Any]) -> torch.Tensor:
    """Slots of the nodes that have one, and of the columns that the accepted path is moved to."""
    nodes = request.step.trees.reference.cache_locations[request.nodes]
    return torch.cat([nodes[nodes >= 0], request.slots(torch.arange(request.length, request.end))])


def extend_slots(request: ComparedRequest[Any]) -> torch.Tensor:
    """Slots that draft-extend writes, junk rows of `fixed` included."""
    rows = present("draft_extend_input", request.step.extend_input)
    low, high = rows.row_starts[request.index : request.index + 2].tolist()
    slots = rows.cache_locations[low:high]
    return slots[slots >= 0]


def column_slots(request: ComparedRequest[Any], low: int, high: int) -> torch.Tensor:
    """Slots that columns low..high-1 had before the step or have after it."""
    both = (request.step.tables_before, request.step.pools.reference)
    slots = torch.cat([pools.req_to_token[request.row, low:high] for pools in both])
    return slots[slots >= 0].unique()


def compare_kv(step: Step, buffer: str, slots: torch.Tensor) -> None:
    """Compare the content of these slots in their order; keys and values of every layer have a budget each."""
    buffers = step.pools.map(lambda pools: getattr(pools, buffer))
    for name in ("keys", "values"):
        for layer in range(buffers.exact.keys.shape[0]):
            content = buffers.map(lambda kv, n=name, at=layer: getattr(kv, n)[at][slots.to(kv.keys.device)].cpu())
            step.check.close(f"{buffer} {name}", content)


def compare_committed(request: ComparedRequest[Any], buffer: str) -> None:
    """Compare the columns that the request has committed after the step."""
    if getattr(request.step.pools.reference, buffer) is not None:
        compare_kv(request.step, buffer, request.slots(torch.arange(request.end)))


def compare_untouched(step: Step, left_out: set[int]) -> None:
    """Require every slot that the step may not write to keep its bits in the pools under test."""
    for buffer, written in written_slots(step, left_out).items():
        before = getattr(step.pools_before, buffer)
        after = getattr(step.pools.fast, buffer)
        if after is None:
            continue
        changed = _changed(before, after)
        for slots in written:
            changed[slots] = False
        if changed.any():
            slot = int(changed.nonzero()[0])
            raise Mismatch(f"stray write, {buffer} pool", "unchanged", _owner(step.pools.reference, slot), slot)
        step.check.tally.fields[f"{buffer} slots untouched"] += 1


def _changed(before: KVBuffer, after: KVBuffer) -> torch.Tensor:
    """bool [slots]: whether any bit of a slot differs; not-a-numbers are compared as bits too."""
    bits = _BITS[before.keys.itemsize]
    pairs = ((before.keys, after.keys), (before.values, after.values))
    keys, values = ((old.view(bits) != new.view(bits)).any(-1).any(-1).any(0) for old, new in pairs)
    return (keys | values).cpu()


def _owner(pools: KVPool, slot: int) -> str:
    places = (pools.req_to_token == slot).nonzero()
    if not len(places):
        return f"slot {slot} (free)"
    row, column = places[0].tolist()
    token = int(pools.token_ids[row, column]) if column < pools.token_ids.shape[1] else -1
    return f"slot {slot} (request row {row}, column {column}, token {token})"


def compare_tables(step: Step, left_out: set[int]) -> None:
    """Compare req_to_token and token_ids of every row but those whose requests were left out, and the page books."""
    reference, _, fast = step.pools
    skipped = {int(step.batch.req_pool_indices[index]) for index in left_out}
    rows = [row for row in range(len(reference.req_to_token)) if row not in skipped]
    for name in ("req_to_token", "token_ids"):
        step.check.same(name, getattr(reference, name)[rows], getattr(fast, name).cpu()[rows])
    if not left_out:
        step.check.require("page books", *compare_books(reference, fast))


def compare_books(reference: KVPool, fast: KVPool) -> tuple[bool, dict[str, int], dict[str, int] | str]:
    """(whether every page is accounted for as in the reference, what the reference's audit says, what fast's does)."""
    expected = reference.audit()
    try:
        found = fast.audit()
    except AssertionError as error:
        return False, expected, str(error)
    return found == expected, expected, found
