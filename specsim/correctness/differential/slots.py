"""KV and tables after a step: slots that had to be written, slots that had to stay, and their owners."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from specsim.core.columns import lane_columns, own_lanes, tail_columns
from specsim.core.drafter import columns_ahead
from specsim.core.pool import KVBuffer, KVPool
from specsim.correctness.differential.comparison import FieldChecks, Mismatch, Trio, WithinRoundingError, present
from specsim.correctness.differential.step import ComparedRequest, ComparedStep

MOST_TIES = 1e-3  # share of a request's fp8 numbers that may lie where rounding decides
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
    before = step.pools_before
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
    lead = step.drafter.lead
    books = deepcopy(step.tables_before)
    block_rows = step.drafter.block_rows
    own_lanes(books, step.batch.req_pool_indices.tolist(), step.batch.seq_lens.tolist(), config, lead, block_rows)
    slots = []
    for row, length in step.batch.rows_and_lens:
        if block_rows:
            slots.append(books.slots(row, torch.arange(length, min(length + block_rows, config.length_limit))))
            continue
        first = length + lead
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


def compare_kv(check: FieldChecks, buffer: str, buffers: Trio[KVBuffer], slots: torch.Tensor, owner: KVPool) -> None:
    """Compare the content of these slots in order; keys and values of every layer have a budget each.

    owner: the pool whose tables tell a slot's request and column. The parts of latent keys are compared by themselves.
    """
    buffers = buffers.map(lambda kv: kv.with_heads_of(buffers.fast))
    for part, content_of in _parts(buffers.reference, buffer):
        for layer in range(buffers.exact.keys.shape[0]):
            content = buffers.map(lambda kv, of=content_of, at=layer: of(kv)[at][slots.to(kv.keys.device)].cpu())
            try:
                check.close(part, content)
            except Mismatch as mismatch:
                if mismatch.node is None or part.endswith("(rms)"):
                    raise
                slot = int(slots[mismatch.node])
                raise Mismatch(
                    part, f"{mismatch.reference} in layer {layer} of {_owner(owner, slot)}", mismatch.fast, slot
                ) from None


def _parts(kv: KVBuffer, buffer: str) -> list[tuple[str, Callable[[KVBuffer], torch.Tensor]]]:
    """Name the parts of a slot's content."""
    if not kv.values_in_keys:
        return [(f"{buffer} keys", lambda kv: kv.keys), (f"{buffer} values", lambda kv: kv.values)]
    rank = kv.values.shape[-1]
    return [
        (f"{buffer} latent channels", lambda kv: kv.values),
        (f"{buffer} rotated channels", lambda kv: kv.keys[..., rank:]),
    ]


def note_other_choices(request: ComparedRequest[Any]) -> None:
    """Stop where rounding chose other experts for a row, or other fp8 numbers for a few of its KV.

    Later layers differ by more than rounding then. A number between two of fp8 may fall to either side, so its codes
    may differ by one. Experts are compared between the reference and its float64 run only.
    """
    pools = request.step.pools
    columns = pools.reference.req_to_token[request.row]
    slots = columns[columns >= 0]
    reference, exact = (pool.side.read(slots) for pool in pools[:2])
    if any(not torch.equal(rows, exact[name]) for name, rows in reference.items()):
        raise WithinRoundingError
    drafted = (pools.map(lambda pool: pool.draft), request.step.drafted)
    buffers = [pools.map(lambda trio: trio.target), *(trio for trio in drafted if None not in trio)]
    for trio in buffers:
        if trio.reference is not None and trio.reference.is_fp8:
            _note_ties(trio, slots)


def _note_ties(buffers: Trio[Any], slots: torch.Tensor) -> None:
    buffers = buffers.map(lambda kv: kv.with_heads_of(buffers.fast))
    names = ("keys",) if buffers.reference.values_in_keys else ("keys", "values")
    for name in names:
        codes = buffers.map(lambda kv, n=name: _ordered(getattr(kv, n)[:, slots.to(kv.keys.device)].cpu()))
        distance = torch.maximum(*((codes.reference - other).abs() for other in codes[1:]))
        if distance.any() and int(distance.max()) == 1 and int(distance.sum()) <= max(2, MOST_TIES * distance.numel()):
            raise WithinRoundingError


def _ordered(stored: torch.Tensor) -> torch.Tensor:
    """Number fp8 values in their order, with both zeros alike, i32."""
    bits = stored.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


def compare_committed(request: ComparedRequest[Any], buffer: str) -> None:
    """Compare the columns that the request has committed after the step, and those of a drafter's lead."""
    buffers = request.step.pools.map(lambda pools: getattr(pools, buffer))
    end = request.end
    if buffer == "draft":
        end = min(end + request.step.drafter.lead, request.config.length_limit)
    if buffer == "target":
        _compare_side(request, request.slots(torch.arange(end)))
    if buffers.reference is not None:
        compare_kv(request.check, buffer, buffers, request.slots(torch.arange(end)), request.step.pools.reference)


def _compare_side(request: ComparedRequest[Any], slots: torch.Tensor) -> None:
    """Compare the side outputs of committed columns."""
    reference, _, fast = request.step.pools.map(lambda pools: pools.side.read(slots.to(pools.req_to_token.device)))
    for name, rows in reference.items():
        request.check.same(f"side output {name}", rows, fast[name])


def compare_untouched(step: ComparedStep, writes: Writes) -> None:
    """Require every other slot of the buffer to keep its bits."""
    changed = _changed(writes.before, writes.after)
    for slots in writes.slots:
        changed[slots] = False
    if changed.any():
        slot = int(changed.nonzero()[0])
        raise Mismatch(f"stray write, {writes.buffer} pool", "unchanged", _owner(step.pools.reference, slot), slot)
    step.check.tally.fields[f"{writes.buffer} slots untouched"] += 1


def _changed(before: KVBuffer, after: KVBuffer) -> torch.Tensor:
    """Mark changed slots, bool [slots]; NaN are compared as bits too."""
    bits = _BITS[before.keys.itemsize]
    pairs = [(before.keys, after.keys)] + ([] if before.values_in_keys else [(before.values, after.values)])
    changed = [(old.view(bits) != new.view(bits)).any(-1).any(-1).any(0) for old, new in pairs]
    return torch.stack(changed).any(0).cpu()


def _owner(pools: KVPool, slot: int) -> str:
    places = (pools.req_to_token == slot).nonzero()
    if not len(places):
        return f"slot {slot} (free)"
    row, column = places[0].tolist()
    token = int(pools.token_ids[row, column]) if column < pools.token_ids.shape[1] else -1
    return f"slot {slot} (request row {row}, column {column}, token {token})"


def compare_tables(step: ComparedStep, not_compared: set[int]) -> None:
    """Compare req_to_token and token_ids of the rows of all compared requests, and the page accounts."""
    reference, _, fast = step.pools
    skipped = {int(step.batch.req_pool_indices[index]) for index in not_compared}
    rows = [row for row in range(len(reference.req_to_token)) if row not in skipped]
    for name in ("req_to_token", "token_ids"):
        step.check.same(name, getattr(reference, name)[rows], getattr(fast, name).cpu()[rows])
    if not not_compared:
        step.check.require("page books", *compare_books(reference, fast))


def compare_books(reference: KVPool, fast: KVPool) -> tuple[bool, dict[str, int], dict[str, int] | str]:
    """Compare page accounts: (whether they are equal, the reference's audit, fast's audit or its error)."""
    expected = reference.audit()
    try:
        actual = fast.audit()
    except AssertionError as error:
        return False, expected, str(error)
    return actual == expected, expected, actual
