"""Cases of slots and of the drafter's next input: commit, columns, pages of lanes, shifted ids, bonus tokens."""

from functools import partial

import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, PrefillInput, Verdict
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.correctness.conformance.contract import DEVICE, Call, KernelCase, arguments, integers, replaced

_LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=3)


def scattered_pool(page_size: int, columns: list[int]) -> KVPool:
    """Make a pool whose requests own that number of columns each, in scattered pages of distinct KV."""
    pages = sum(-(-count // page_size) for count in columns) + 3
    target = KVBuffer(_LAYOUT, pages * page_size, torch.float32)
    target.keys.copy_(torch.arange(target.keys.numel()).view_as(target.keys))
    target.values.copy_(-1.0 - target.keys)
    pools = KVPool(target, None, page_size, max(1, len(columns)), max(columns, default=1) + 1)
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(page_size)).tolist()
    for row, count in enumerate(columns):
        pages_of_row = [order.pop() for _ in range(-(-count // page_size))]
        row_slots = [page * page_size + offset for page in pages_of_row for offset in range(page_size)]
        pools.req_to_token[row, : len(row_slots)] = integers(row_slots)
    return pools


def batch_of(seq_lens: list[int], rows: list[int]) -> Batch:
    """Make requests of these lengths in these rows of the table."""
    params = [SamplingParams()] * len(rows)
    return Batch.of(range(len(rows)), rows, seq_lens, params, vocab_size=8)


# The commit


def move_call(page_size: int, seq_lens: list[int], paths: list[list[int]], num_nodes: int) -> Call:
    """Make requests whose accepted paths are these nodes of their trees."""
    from specsim.reference.kv import commit, tree_locations

    config = SpecConfig(topk=num_nodes - 1, num_steps=1, num_draft_tokens=num_nodes, page_size=page_size)
    batch = batch_of(seq_lens, list(range(len(paths))))
    pools = scattered_pool(page_size, [n + num_nodes for n in seq_lens])
    locations = tree_locations(batch, config, pools).flatten()
    accept_index = integers(
        [b * num_nodes + node for node in path] + [-1] * (num_nodes - len(path)) for b, path in enumerate(paths)
    ).view(len(paths), num_nodes)
    before = [list(kv.clone()) for kv in (pools.target.keys, pools.target.values)]
    counts = (accept_index >= 0).sum(1, dtype=torch.int32)
    verdict = Verdict(accept_index.flatten(), accept_index, counts - 1, counts, accept_index.float())
    commit(batch, locations, verdict, pools)
    source = locations[accept_index[accept_index >= 0]]
    target = [pools.slots(row, n + torch.arange(len(paths[row]))) for row, n in batch.rows_and_lens]
    expected = {"k_buffer": list(pools.target.keys), "v_buffer": list(pools.target.values)}
    return Call(arguments("move_kv", *before, torch.cat([source[:0], *target]), source), expected)


def _in_int32() -> Call:
    call = move_call(4, [7, 3], [[0, 2, 5], [0, 1]], 6)
    return replaced(call, **{name: call.arguments[name].int() for name in ("tgt_loc", "src_loc")})


_MOVE = (
    KernelCase(
        "move_kv", "paths over page edges", lambda: move_call(4, [7, 3, 8], [[0, 2, 5], [0, 1], [0, 3, 4, 5]], 6)
    ),
    KernelCase("move_kv", "slots that are both read and written", lambda: move_call(1, [5], [[0, 2, 3, 4, 5, 6]], 7)),
    KernelCase("move_kv", "a chain, already in its place", lambda: move_call(4, [6, 2], [[0, 1, 2, 3], [0, 1]], 4)),
    KernelCase("move_kv", "only roots", lambda: move_call(2, [3, 4], [[0], [0]], 3)),
    KernelCase("move_kv", "no requests", lambda: move_call(4, [], [], 6)),
    KernelCase("move_kv", "locations in int32", _in_int32, may_refuse=True),
)


# The tree's columns


def locations_call(page_size: int, seq_lens: list[int], rows: list[int], num_nodes: int) -> Call:
    """Make one call on these rows of the request table, which is wider than any of them needs."""
    from specsim.reference.kv import tree_locations

    pools = scattered_pool(page_size, [max(seq_lens, default=0) + num_nodes + 2] * (max(rows, default=0) + 1))
    batch = batch_of(seq_lens, rows)
    config = SpecConfig(1, num_nodes - 1, num_nodes, page_size)
    table = torch.where(pools.req_to_token < 0, 0, pools.req_to_token).int()
    start = batch.seq_lens
    values = (batch.req_pool_indices, table, start, start + num_nodes, len(rows), num_nodes, DEVICE)
    expected = {"out_cache_loc": tree_locations(batch, config, pools).flatten()}
    return Call(arguments("cache_locations", *values), expected)


_LOCATIONS = (
    KernelCase("cache_locations", "rows in any order", lambda: locations_call(1, [5, 9, 0], [2, 0, 3], 8)),
    KernelCase("cache_locations", "page edges", lambda: locations_call(4, [3, 4, 5, 8], [3, 1, 0, 2], 5)),
    KernelCase("cache_locations", "33 columns", lambda: locations_call(16, [31, 1], [1, 0], 33)),
    KernelCase("cache_locations", "100 columns", lambda: locations_call(1, [64], [0], 100)),
    KernelCase("cache_locations", "no requests", lambda: locations_call(1, [], [], 8)),
)


# The lanes' columns


def lanes_call(page_size: int, k: int, num_steps: int, seq_lens: list[int]) -> Call:
    """Make requests of these lengths, in reverse order in the table."""
    from specsim.core.pool import lane_columns, tail_columns

    nodes = num_steps + 1 if k == 1 else 2
    config = SpecConfig(k, num_steps, nodes, page_size)
    columns = [config.reserved_columns(length) for length in seq_lens]
    pools = scattered_pool(page_size, columns)
    rows = list(range(len(seq_lens)))[::-1]
    order = [seq_lens[row] for row in rows]
    none = torch.empty(0, dtype=torch.int64)
    lanes = [pools.slots(row, lane_columns(length, config)) for row, length in zip(rows, order, strict=True)]
    tails = [pools.slots(row, tail_columns(length, config)) for row, length in zip(rows, order, strict=True)]
    expected = {
        "out_cache_loc": torch.cat([none, *(slots.flatten() for slots in lanes)]),
        "source_cache_loc": torch.cat([none, *(slots[:1].expand_as(slots[1:]).flatten() for slots in tails)]),
        "target_cache_loc": torch.cat([none, *(slots[1:].flatten() for slots in tails)]),
    }
    values = integers(rows), pools.req_to_token, integers(order), k, num_steps, page_size
    return Call(arguments("lane_locations", *values), expected)


_LANES = (
    KernelCase("lane_locations", "pages of one slot", partial(lanes_call, 1, 4, 3, [5, 0, 9])),
    KernelCase("lane_locations", "a chain", partial(lanes_call, 4, 1, 5, [7, 8, 3])),
    KernelCase("lane_locations", "7 tokens, pages of 4, 5 steps, 8 lanes", partial(lanes_call, 4, 8, 5, [7])),
    KernelCase("lane_locations", "every place in a page", partial(lanes_call, 4, 3, 2, [4, 5, 6, 7, 8])),
    KernelCase("lane_locations", "no requests", partial(lanes_call, 4, 3, 2, [])),
)


def shift_call(lens: list[int], next_tokens: list[int]) -> Call:
    """Make chunks of these lengths; the token after a chunk is sampled or, before the last, known."""
    from specsim.reference.kv import shift_left

    input_ids = torch.arange(100, 100 + sum(lens))
    starts = torch.nn.functional.pad(integers(lens).cumsum(0), (1, 0))
    prefill = PrefillInput(input_ids, starts, torch.zeros(len(lens), dtype=torch.int64), integers(next_tokens))
    expected = {"input_ids": shift_left(prefill, prefill.next_tokens)}
    values = input_ids, starts[:-1].contiguous(), integers(lens), integers(next_tokens)
    return Call(arguments("shift_ids", *values), expected)


_SHIFT = (
    KernelCase("shift_ids", "chunks of 1, 2 and 8 tokens", partial(shift_call, [1, 2, 8], [7, 8, 9])),
    KernelCase("shift_ids", "chunks of 9, 17 and 100 tokens", partial(shift_call, [9, 17, 100], [0, 2**31 - 1, 5])),
    KernelCase("shift_ids", "a chunk of 5000 tokens", partial(shift_call, [5000, 1], [3, 4])),
    KernelCase("shift_ids", "no requests", partial(shift_call, [], [])),
)


def bonus_call(paths: list[int], width: int, num_nodes: int) -> Call:
    """Make one call on trees of num_nodes.

    paths: number of accepted nodes per request, with the root. width: of a row.
    """
    from specsim.reference.kv import draft_extend_input

    batch = len(paths)
    accept_lens = integers(paths, torch.int32)
    predict = (1000 + torch.arange(batch * num_nodes)).int()
    step = torch.arange(width)
    nodes = torch.arange(batch)[:, None] * num_nodes + (step * 2).clamp(max=num_nodes - 1)
    accept_index = torch.where(step < accept_lens[:, None], nodes, -1).int()
    verdict = Verdict(predict, accept_index, accept_lens - 1, accept_lens, torch.zeros(batch, width))
    rows = torch.arange(batch * 64).view(batch, 64)
    features = torch.zeros(batch * num_nodes, 1)
    extend_input = draft_extend_input(batch_of([4] * batch, list(range(batch))), verdict, features, rows, 60, "fixed")
    tokens = torch.where(accept_index < 0, -1, predict[accept_index.long()]).int().flatten()
    values = tokens, accept_lens, torch.full_like(accept_lens, -7), width
    return Call(arguments("bonus_tokens", *values), {"bonus_tokens": extend_input.bonus_tokens})


_BONUS = (
    KernelCase("bonus_tokens", "rows of 4, of trees of 8", partial(bonus_call, [1, 4, 2, 3, 4], 4, 8)),
    KernelCase("bonus_tokens", "rows of 6, of trees of 11", partial(bonus_call, [6, 1, 5], 6, 11)),
    KernelCase("bonus_tokens", "rows of 1", partial(bonus_call, [1, 1], 1, 1)),
    KernelCase("bonus_tokens", "no requests", partial(bonus_call, [], 4, 8)),
)

CASES = (*_MOVE, *_LOCATIONS, *_LANES, *_SHIFT, *_BONUS)
