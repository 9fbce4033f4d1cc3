"""Columns of lanes and tails by formula and by exhaustion, copies and the commit slot by slot."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.columns import reserve_lanes
from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict
from specsim.core.pool import KVBuffer, KVLayout, KVPool, lane_columns, tail_columns
from specsim.fast.kv import slots as fast
from specsim.reference.kv import commit, duplicate_tails, record_tokens, tree_locations

from .trees import make_batch

LENGTHS = range(1, 36)
PAGE_SIZES = [1, 2, 4, 5, 16]


def setting(topk: int, num_steps: int, page_size: int, **changes) -> SpecConfig:
    num_draft_tokens = num_steps + 1 if topk == 1 else topk + 1
    return SpecConfig(topk, num_steps, num_draft_tokens, page_size, **changes)


def test_the_worked_example_of_seven_tokens_on_pages_of_four():
    config = setting(8, 5, 4)
    assert lane_columns(7, config)[:, 0].tolist() == [7, 15, 23, 31, 39, 47, 55, 63]
    assert lane_columns(7, config)[1].tolist() == [15, 16, 17, 18, 19]
    assert tail_columns(7, config)[:3].tolist() == [[4, 5, 6], [12, 13, 14], [20, 21, 22]]


@pytest.mark.parametrize(("topk", "page_size"), [(1, 1), (4, 1), (1, 16)])
def test_lanes_share_the_prefix_without_pages_or_other_lanes(topk, page_size):
    config = setting(topk, 3, page_size)
    assert lane_columns(21, config).tolist() == [[21 + lane * 3 + step for step in range(3)] for lane in range(topk)]
    assert tail_columns(21, config).shape == (topk, 0)


@pytest.mark.parametrize("page_size", PAGE_SIZES[1:])
def test_lanes_on_pages_have_the_columns_of_the_contract(page_size):
    for length, topk, num_steps in itertools.product(LENGTHS, (2, 3), (1, 4)):
        last = length % page_size
        base, pages = length - last, -(-(last + num_steps) // page_size)
        starts = [base + lane * pages * page_size for lane in range(topk)]
        config = setting(topk, num_steps, page_size)
        assert lane_columns(length, config).tolist() == [[s + last + i for i in range(num_steps)] for s in starts]
        assert tail_columns(length, config).tolist() == [[s + i for i in range(last)] for s in starts]
        assert pages <= config.pages_per_lane


# Content. A slot's KV has unique numbers, so that a copy shows its source.


def numbered_buffer(layers: int, slots: int) -> KVBuffer:
    buffer = KVBuffer(KVLayout(layers, 2, 3), slots, torch.float64)
    buffer.keys[:] = torch.arange(buffer.keys.numel(), dtype=torch.float64).view(buffer.keys.shape)
    buffer.values[:] = -1 - buffer.keys
    return buffer


def make_pools(
    page_size: int, columns: list[int], num_layers: int = 3, turn: int | None = None
) -> tuple[KVPool, list[int]]:
    """Make numbered pools with pages in random order, or page 0 after `turn` others, and a row for each request.

    Each row owns `columns` columns.
    """
    num_pages = sum(-(-count // page_size) for count in columns) + 2
    slots = num_pages * page_size
    target, draft = numbered_buffer(num_layers, slots), numbered_buffer(2, slots)
    pools = KVPool(target, draft, page_size, num_pages, max(columns) + page_size)
    taken = [pools.open() for _ in range(num_pages)]
    for row in taken:
        pools.reserve(row, page_size)
    order = torch.randperm(num_pages) if turn is None else torch.arange(num_pages).roll(turn)
    for index in order.tolist():
        pools.close(taken[index])
    rows = [pools.open() for _ in columns]
    for row, count in zip(rows, columns, strict=True):
        pools.reserve(row, count)
    return pools, rows


def content(buffer: KVBuffer) -> torch.Tensor:
    """Read keys and values, [slots, everything in a slot]."""
    return torch.cat([buffer.keys, buffer.values], dim=-1).transpose(0, 1).flatten(1).clone()


def assert_moved(before: torch.Tensor, after: torch.Tensor, moves: dict[int, int]) -> None:
    """Check that `moves` maps each changed slot to the slot with its content before, and that no other changed."""
    source = [moves.get(slot, slot) for slot in range(len(before))]
    assert torch.equal(after, before[source])


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("topk", [1, 2, 3])
def test_tails_are_copied_in_the_draft_pool_only(topk, page_size):
    config, lengths = setting(topk, 3, page_size), [7, 8, 17]
    pools, rows = make_pools(page_size, [config.reserved_columns(length) for length in lengths])
    draft, target, table = content(pools.draft), content(pools.target), pools.req_to_token.clone()
    duplicate_tails(make_batch(rows, lengths), config, pools)
    moves = {}
    for row, length in zip(rows, lengths, strict=True):
        tails = pools.req_to_token[row][tail_columns(length, config)].tolist()
        moves |= {slot: own for tail in tails[1:] for slot, own in zip(tail, tails[0], strict=True)}
    assert_moved(draft, content(pools.draft), moves)
    assert torch.equal(content(pools.target), target)
    assert torch.equal(pools.req_to_token, table)
    assert bool(moves) == (topk > 1 and page_size > 1)


@pytest.mark.parametrize("release", ["finish", "round"])
def test_the_lanes_that_a_round_owns_hold_every_tail_and_step(release):
    """A column that is not owned is an error in the pool."""
    for config in (setting(3, 4, page_size, release=release) for page_size in PAGE_SIZES):
        for length in LENGTHS:
            pools, (row,) = make_pools(config.page_size, [length + 3 * config.need + config.page_size])
            pools.release(row, length)
            reserve_lanes(pools, [row], [length], config)
            duplicate_tails(make_batch([row], [length]), config, pools)
            pools.slots(row, lane_columns(length, config))


def accept(paths: list[list[int]], num_nodes: int, width: int) -> torch.Tensor:
    """Make accept_index i32 [B, S+1] from paths of node numbers, root included."""
    rows = [[request * num_nodes + node for node in path] for request, path in enumerate(paths)]
    return torch.tensor([row + [-1] * (width - len(row)) for row in rows], dtype=torch.int32).view(-1, width)


def verdict_of(accept_index: torch.Tensor, predict: torch.Tensor | None = None) -> Verdict:
    counts = (accept_index >= 0).sum(1, dtype=torch.int32)
    tokens = accept_index.flatten() if predict is None else predict
    return Verdict(tokens, accept_index, counts - 1, counts, accept_index.float())


# Six nodes, three steps. Overlaps: 1,2,3 stay; 2,3,5 and 3,4,5 read where an earlier node of the path is written.
PATHS = [[[0]], [[0, 1, 2, 3]], [[0, 2, 3, 5]], [[0, 3, 4, 5], [0, 5]], [[0, 2], [0], [0, 1, 4]]]


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("paths", PATHS)
def test_commit_moves_the_path_to_the_columns_after_the_prefix(paths, page_size):
    lengths = [5, 8, 15][: len(paths)]
    pools, rows = make_pools(page_size, [length + 6 for length in lengths])
    draft, target, table = content(pools.draft), content(pools.target), pools.req_to_token.clone()
    slots = [table[row, length : length + 6].tolist() for row, length in zip(rows, lengths, strict=True)]
    commit(make_batch(rows, lengths), torch.tensor(slots).flatten(), verdict_of(accept(paths, 6, 4)), pools)
    moves = {own[step]: own[node] for own, path in zip(slots, paths, strict=True) for step, node in enumerate(path)}
    assert_moved(target, content(pools.target), moves)
    assert torch.equal(content(pools.draft), draft)
    assert torch.equal(pools.req_to_token, table)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_commit_of_a_chain_moves_nothing(accepted):
    pools, rows = make_pools(4, [9])
    target, slots = content(pools.target), pools.req_to_token[rows[0], 5:9]
    commit(make_batch(rows, [5]), slots, verdict_of(accept([list(range(accepted + 1))], 4, 4)), pools)
    assert torch.equal(content(pools.target), target)


def test_a_path_that_reads_what_it_writes_is_read_first():
    """Columns 5..8 take nodes 0, 2, 1, 3.

    A loop over the path would write node 1's slot before reading it.
    """
    pools, (row,) = make_pools(1, [9])
    before, slots = content(pools.target), pools.req_to_token[row, 5:9]
    commit(make_batch([row], [5]), slots, verdict_of(accept([[0, 2, 1, 3]], 4, 4)), pools)
    assert torch.equal(content(pools.target)[slots], before[slots[[0, 2, 1, 3]]])


def test_no_requests_move_nothing():
    pools, _ = make_pools(4, [9])
    before = content(pools.draft), content(pools.target)
    nobody = make_batch([], [])
    duplicate_tails(nobody, setting(3, 3, 4), pools)
    commit(nobody, torch.empty(0, dtype=torch.int64), verdict_of(accept([], 6, 4)), pools)
    assert torch.equal(content(pools.draft), before[0])
    assert torch.equal(content(pools.target), before[1])


# The kernels, compared with the reference over the same pool, including all slots that must not change. Their batch has
# one more, padded request in front, which would be taken for the table's last row.


def padded(rows: list[int], lengths: list[int], device: str) -> Batch:
    return make_batch([-1, *rows], [0, *lengths]).to(device)


def twin(pools: KVPool, device: str, dtype: torch.dtype = torch.float32) -> KVPool:
    """Copy the pool for kernels.

    Its numbers are integers that are exact in float32.
    """
    buffers = []
    for buffer in (pools.target, pools.draft):
        layers, slots, heads, dim = buffer.keys.shape
        buffers.append(KVBuffer(KVLayout(layers, heads, dim), slots, dtype, device))
    other = KVPool(*buffers, pools.page_size, *pools.token_ids.shape)
    other.copy_(pools)
    return other


def assert_same(pools: KVPool, other: KVPool) -> None:
    for ours, theirs in ((pools.target, other.target), (pools.draft, other.draft)):
        assert torch.equal(content(ours).to(theirs.keys.dtype), content(theirs).cpu())
    assert torch.equal(pools.req_to_token, other.req_to_token.cpu())
    assert torch.equal(pools.token_ids, other.token_ids.cpu())


@pytest.mark.parametrize("page_size", [1, 4, 5, 16])
@pytest.mark.parametrize("topk", [1, 2, 7])
def test_kernels_copy_the_same_tails(topk, page_size, device, program_order):
    config, lengths = setting(topk, 3, page_size), [7, 8, 17, 31]
    pools, rows = make_pools(page_size, [config.reserved_columns(length) for length in lengths])
    other = twin(pools, device)
    duplicate_tails(make_batch(rows, lengths), config, pools)
    fast.duplicate_tails(padded(rows, lengths, device), config, other)
    assert_same(pools, other)


def test_kernels_copy_tails_to_any_page_also_the_pools_first(device):
    config, length = setting(3, 3, 4), 7
    columns = config.reserved_columns(length)
    for turn in range(columns // 4):
        pools, rows = make_pools(4, [columns], turn=turn)
        assert pools.req_to_token[rows[0], 4 * turn] == 0
        other = twin(pools, device)
        duplicate_tails(make_batch(rows, [length]), config, pools)
        fast.duplicate_tails(padded(rows, [length], device), config, other)
        assert_same(pools, other)


def with_a_padded_request(accept_index: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Add a first padded request with the longest accepted path, which only its table row can stop."""
    own = torch.arange(accept_index.shape[1], dtype=torch.int32)[None]
    return torch.cat([own, torch.where(accept_index < 0, -1, accept_index + num_nodes)])


def commit_both(
    lengths: list[int], accept_index: torch.Tensor, num_nodes: int, page_size: int, device: str, num_layers: int = 3
) -> None:
    pools, rows = make_pools(page_size, [length + num_nodes for length in lengths], num_layers)
    columns = torch.tensor(lengths)[:, None] + torch.arange(num_nodes)
    locations, other = pools.req_to_token[torch.tensor(rows)[:, None], columns].flatten(), twin(pools, device)
    predict = torch.randint(100, (num_nodes * (1 + len(rows)),), dtype=torch.int32)
    batch, verdict = make_batch(rows, lengths), verdict_of(accept_index, predict[num_nodes:])
    counts = verdict.num_accepted_tokens
    commit(batch, locations, verdict, pools)
    record_tokens(batch, verdict, pools)
    assert (pools.token_ids >= 0).sum() == counts.sum()
    more, path = torch.cat([locations[:num_nodes], locations]), with_a_padded_request(accept_index, num_nodes)
    verdict = verdict_of(path, predict).to(device)
    given = padded(rows, lengths, device)
    given = replace(given, num_rounds=given.num_rounds + 5)
    next_lens, num_rounds = fast.commit(given, more.to(device), verdict, other)
    assert next_lens.tolist() == [0, *batch.after(counts).seq_lens.tolist()]
    assert num_rounds.tolist() == [0] + [6] * len(rows)
    assert_same(pools, other)


@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("paths", [*PATHS, [[0, 2, 1, 3]], [[0, 3, 2, 1], [0, 1, 2, 3]]])
def test_kernels_commit_the_same_content(paths, page_size, num_layers, device, program_order):
    """Paths include nodes in no order, which read slots that an earlier node overwrites."""
    commit_both([5, 8, 15][: len(paths)], accept(paths, 6, 4), 6, page_size, device, num_layers)


@settings(max_examples=25)
@given(st.data())
def test_kernels_commit_any_path_of_any_tree(data):
    num_nodes, depth = data.draw(st.integers(2, 17)), data.draw(st.integers(0, 8))
    nodes = st.lists(st.integers(1, num_nodes - 1), max_size=min(depth, num_nodes - 1), unique=True)
    paths = [[0, *data.draw(nodes)] for _ in range(data.draw(st.integers(1, 2)))]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    commit_both([3, 9][: len(paths)], accept(paths, num_nodes, depth + 1), num_nodes, 4, device)


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_kernels_do_not_move_the_kv_of_a_chain(accepted, device):
    commit_both([5, 9], accept([list(range(accepted + 1)), [0]], 4, 4), 4, 4, device)


@pytest.mark.parametrize("num_nodes", [1, 7, 64])
def test_kernels_find_the_same_slots_for_a_tree(num_nodes, device, program_order):
    config = SpecConfig.plain() if num_nodes == 1 else SpecConfig(8, 5, num_nodes)
    lengths = [5, 8, 16]
    pools, rows = make_pools(4, [length + num_nodes for length in lengths])
    expected = tree_locations(make_batch(rows, lengths), config, pools)
    batch, other = padded(rows, lengths, device), twin(pools, device)
    out = fast.tree_locations(batch, config, other)
    assert out.dtype == torch.int64
    assert out.tolist() == [[-1] * num_nodes, *expected.tolist()]
    assert fast.tree_locations(batch, config, other, out=out) is out


def test_kernels_move_nothing_of_no_requests(device):
    pools, _ = make_pools(4, [9])
    other, nobody, config = twin(pools, device), make_batch([], []).to(device), setting(3, 3, 4)
    none = torch.empty(0, dtype=torch.int32, device=device)
    fast.duplicate_tails(nobody, config, other)
    fast.commit(nobody, none.long(), Verdict(none, none.view(0, 4), none, none, none.float()), other)
    assert fast.tree_locations(nobody, config, other).shape == (0, 4)
    assert_same(pools, other)
