"""KV and tables after a phase: what must have been written, what must not, and whose it is."""

from copy import deepcopy

import torch

from specsim.core.columns import lane_columns, own_lanes, tail_columns
from specsim.core.phases import DraftExtendInput, VerifyInput
from specsim.core.pool import KVBuffer, KVPool
from specsim.correctness.differential.comparison import Comparison, Trio
from specsim.correctness.differential.divergence import Mismatch
from specsim.correctness.differential.scene import Scene

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def lane_slots(scene: Scene) -> list[torch.Tensor]:
    """List each request's slots of draft lanes and of the tail copies of lanes 1..K-1.

    Under release `round` lanes have been given back when the phase ends, so they are taken once more in a copy of the
    books from before it.
    """
    config = scene.config
    books = deepcopy(scene.owned)
    own_lanes(books, scene.batch.req_pool_indices.tolist(), scene.batch.seq_lens.tolist(), config)
    slots = []
    for row, length in scene.batch.rows_and_lens:
        steps = max(0, min(config.num_steps - 1, scene.config.length_limit - length))
        lanes = lane_columns(length, config)[:, :steps]
        tails = tail_columns(length, config)[1:]
        slots.append(books.slots(row, torch.cat([lanes.flatten(), tails.flatten()])))
    return slots


def tree_slots(scene: Scene, request: int, tree: VerifyInput, num_accepted_tokens: int) -> torch.Tensor:
    """Slots of the nodes that have one, and of the columns that the accepted path is moved to."""
    num_nodes = scene.config.num_draft_tokens
    (row, length) = scene.place(request)
    nodes = tree.cache_locations[request * num_nodes :][:num_nodes]
    path = scene.pools.reference.slots(row, length + torch.arange(num_accepted_tokens))
    return torch.cat([nodes[nodes >= 0], path])


def extend_slots(request: int, state: DraftExtendInput) -> torch.Tensor:
    """Slots that draft-extend writes, junk rows of `fixed` included."""
    low, high = state.row_starts[request : request + 2].tolist()
    slots = state.cache_locations[low:high]
    return slots[slots >= 0]


def column_slots(scene: Scene, request: int, low: int, high: int) -> torch.Tensor:
    """Slots that columns low..high-1 had before the phase or have after it."""
    row, _ = scene.place(request)
    slots = torch.cat([books.req_to_token[row, low:high] for books in (scene.owned, scene.pools.reference)])
    return slots[slots >= 0].unique()


def compare_kv(scene: Scene, buffer: str, slots: torch.Tensor, check: Comparison) -> None:
    """The content of these slots, in the order of their columns; keys and values of every layer have a budget each."""
    buffers = scene.pools.map(lambda pools: getattr(pools, buffer))
    for name in ("keys", "values"):
        for layer in range(buffers.exact.keys.shape[0]):
            content = buffers.map(lambda kv, n=name, at=layer: getattr(kv, n)[at][slots.to(kv.keys.device)].cpu())
            check.close(f"{buffer} {name}", content)


def compare_committed(scene: Scene, buffer: str, request: int, length: int, check: Comparison) -> None:
    """Columns 0..length-1 of a request."""
    row, _ = scene.place(request)
    if getattr(scene.pools.reference, buffer) is not None:
        compare_kv(scene, buffer, scene.pools.reference.slots(row, torch.arange(length)), check)


def compare_untouched(scene: Scene, written: dict[str, list[torch.Tensor]], check: Comparison) -> None:
    """Every other slot of the fast column's pools keeps its bits; written: by buffer, what the phase writes."""
    for buffer in ("target", "draft"):
        before = getattr(scene.before, buffer)
        after = getattr(scene.pools.fast, buffer)
        if after is None:
            continue
        changed = _changed(before, after)
        for slots in written[buffer]:
            changed[slots] = False
        if changed.any():
            slot = int(changed.nonzero()[0])
            raise Mismatch(f"stray write, {buffer} pool", "unchanged", _owner(scene, slot), slot)
        check.tally.fields[f"{buffer} slots untouched"] += 1


def _changed(before: KVBuffer, after: KVBuffer) -> torch.Tensor:
    """bool [slots]: whether any bit of a slot differs; not-a-numbers are compared as bits too."""
    bits = _BITS[before.keys.itemsize]
    pairs = ((before.keys, after.keys), (before.values, after.values))
    keys, values = ((old.view(bits) != new.view(bits)).any(-1).any(-1).any(0) for old, new in pairs)
    return (keys | values).cpu()


def _owner(scene: Scene, slot: int) -> str:
    tables = scene.pools.reference.req_to_token
    tokens = scene.pools.reference.token_ids
    places = (tables == slot).nonzero()
    if not len(places):
        return f"slot {slot} (free)"
    row, column = places[0].tolist()
    token = int(tokens[row, column]) if column < tokens.shape[1] else -1
    return f"slot {slot} (request row {row}, column {column}, token {token})"


def compare_tables(scene: Scene, left_out: set[int], check: Comparison) -> None:
    """req_to_token and token_ids of every row but those whose requests were left out, and the page books."""
    pools: Trio[KVPool] = scene.pools
    skipped = {scene.place(request)[0] for request in left_out}
    rows = [row for row in range(len(pools.reference.req_to_token)) if row not in skipped]
    for name in ("req_to_token", "token_ids"):
        check.same(name, getattr(pools.reference, name)[rows], getattr(pools.fast, name).cpu()[rows])
    if not left_out:
        check.require("page books", *compare_books(pools.reference, pools.fast))


def compare_books(reference: KVPool, fast: KVPool) -> tuple[bool, dict[str, int], dict[str, int] | str]:
    """(whether every page is accounted for as in the reference, what the reference's audit says, what fast's does)."""
    expected = reference.audit()
    try:
        found = fast.audit()
    except AssertionError as error:
        return False, expected, str(error)
    return found == expected, expected, found
