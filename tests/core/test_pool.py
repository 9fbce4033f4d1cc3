from collections import Counter, deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.errors import InputError
from specsim.core.pool import KVBuffer, KVPool, OutOfSlots

from .pools import LAYOUT, busy_pool, make_pool


def tensors_of(value, path: str = "pool") -> dict[str, torch.Tensor]:
    """Find all tensors of a pool and of its parts, so that new ones are included."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    is_part = type(value).__module__.startswith("specsim.")
    parts = value if isinstance(value, dict) else vars(value) if is_part else {}
    return {name: tensor for key, part in parts.items() for name, tensor in tensors_of(part, f"{path}.{key}").items()}


def snapshot(pool: KVPool):
    """Copy everything but the KV itself."""
    allocator = pool._allocator
    books = (pool._pages, pool._committed, pool._cached_pages, pool._free_rows, allocator.limit, allocator._holders)
    return pool.req_to_token.tolist(), pool.token_ids.tolist(), allocator.free_pages(), repr(books)


def usage(slots, **numbers):
    """Make the result of `usage` and `audit`, where unnamed numbers are 0 and the rest is free."""
    names = ("reserved", "committed", "cached", "withheld", "requests")
    numbers = dict.fromkeys(names, 0) | numbers
    return {"slots": slots, "free": slots - numbers["reserved"] - numbers["committed"], **numbers}


def numbered(num_slots: int) -> KVBuffer:
    """Make a buffer in which every slot has its own number, in every layer and head, with values negated."""
    buffer = KVBuffer(LAYOUT, num_slots, torch.float32)
    buffer.keys[:] = torch.arange(num_slots)[:, None, None]
    buffer.values[:] = -buffer.keys
    return buffer


def held(buffer: KVBuffer) -> list[int]:
    """Read the number in every slot, which must be equal in all layers, heads and components, and in the values."""
    assert torch.equal(buffer.keys, -buffer.values)
    assert torch.equal(buffer.keys, buffer.keys[:1, :, :1, :1].expand_as(buffer.keys))
    return buffer.keys[0, :, 0, 0].int().tolist()


def test_close_returns_everything_and_the_row_can_be_reopened():
    pool = make_pool(num_requests=1)
    row = pool.open()
    pool.reserve(row, 9)
    pool.token_ids[row, :9] = 7
    pool.close(row)
    assert (pool.req_to_token == -1).all()
    assert (pool.token_ids == -1).all()
    assert pool.audit() == usage(40)
    assert pool.open() == row


def test_requests_reserved_together_have_the_slots_as_in_turn():
    together, in_turn = make_pool(), make_pool()
    wanted = [(together.open(), 5), (together.open(), 0), (together.open(), 9)]
    together.reserve_all(wanted)
    together.reserve_all([(0, 13), (2, 9)])
    for row, columns in [*wanted, (0, 13), (2, 9)]:
        in_turn.reserve(in_turn.open() if row not in in_turn._pages else row, columns)
    assert snapshot(together) == snapshot(in_turn)
    assert together.audit()["reserved"] == 4 * (4 + 0 + 3)


def test_requests_before_the_slots_run_out_have_theirs():
    pool = make_pool(num_slots=16)
    rows = [pool.open() for _ in range(3)]
    with pytest.raises(OutOfSlots):
        pool.reserve_all([(rows[0], 4), (rows[1], 8), (rows[2], 8)])
    assert [pool.owned_columns(row) for row in rows] == [4, 8, 0]
    pool.audit()


def test_table_is_whole_pages_wide_and_starts_empty():
    pool = make_pool(width=30)
    assert pool.req_to_token.shape == (3, 32)
    assert pool.token_ids.shape == (3, 30)
    assert (pool.req_to_token == -1).all()
    assert (pool.token_ids == -1).all()


def test_a_pool_is_whole_pages():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("num_slots", 42)):
        make_pool(num_slots=42)


def shared_pool() -> KVPool:
    """Make a pool with kept pages 0 and 1, with which rows 0 and 1 begin.

    Each continues with its own page, 2 or 3.
    """
    pool = make_pool()
    first, second = pool.open(), pool.open()
    pool.reserve(first, 8)
    pool.mark_committed(first, 8)
    pool.keep(pool.pages(first))
    pool.share(second, pool.pages(first))
    pool.reserve(first, 12)
    pool.reserve(second, 12)
    pool.audit()
    return pool


def narrow_pool() -> KVPool:
    """Make a pool with more slots than a row has columns."""
    pool = make_pool(width=8)
    pool.reserve(pool.open(), 3)
    return pool


REFUSED = {
    "columns beyond the table": (narrow_pool, lambda pool: pool.reserve(0, 12), OutOfSlots, None),
    "shared pages after others": (shared_pool, lambda pool: pool.share(0, [0]), ValueError, None),
    "columns that are not owned": (busy_pool, lambda pool: pool.mark_committed(0, 13), IndexError, None),
    "a page that is free": (busy_pool, lambda pool: pool._allocator.free([9]), ValueError, None),
    "a limit below 0": (busy_pool, lambda pool: pool.limit(-1), InputError, "num_slots"),
    "a limit beyond the pool": (busy_pool, lambda pool: pool.limit(41), InputError, "num_slots"),
}


@pytest.mark.parametrize(("make", "call", "error", "name"), REFUSED.values(), ids=REFUSED)
def test_refused_calls_change_nothing(make, call, error, name):
    pool = make()
    before = snapshot(pool)
    with pytest.raises(error, match=name, check=lambda raised: type(raised) is error):
        call(pool)
    assert snapshot(pool) == before


@pytest.mark.parametrize("source", [busy_pool, shared_pool], ids=["own pages", "shared pages"])
def test_a_copy_has_the_same_content_independently(source):
    pool, copy = source(), make_pool()
    pool.limit(36)
    content, copied = tensors_of(pool), tensors_of(copy)
    for number, tensor in enumerate(content.values()):
        if not (tensor is pool.req_to_token or tensor is pool.token_ids):
            tensor.copy_(number + torch.arange(tensor.numel()).view(tensor.shape))
    copy.reserve(copy.open(), 16)  # its own content is gone
    copy.copy_(pool)
    assert snapshot(copy) == snapshot(pool)
    assert [name for name, tensor in copied.items() if not torch.equal(tensor, content[name])] == []
    assert not {tensor.data_ptr() for tensor in copied.values()} & {tensor.data_ptr() for tensor in content.values()}
    assert copy.audit() == pool.audit()
    before, third = snapshot(pool), copy.open()
    copy.share(third, copy.pages(0)[:1])
    copy.mark_committed(1, 1)
    copy.keep(copy.pages(0)[-1:])
    copy.reserve(third, 9)
    copy.limit(0)
    copy.close(0)
    assert snapshot(pool) == before
    before = snapshot(copy)
    pool.close(1)
    assert snapshot(copy) == before


class Model:
    """Expected accounting: pages and committed columns of each row, pages kept, pages and rows free.

    Each method takes two numbers that choose among its possible arguments, and does nothing where there are none.
    """

    num_pages, num_rows = 8, 3

    def __init__(self, page_size):
        self.page_size, self.most = page_size, self.num_pages
        self.pool = make_pool(self.num_pages * page_size, page_size, self.num_rows, self.num_pages * page_size)
        self.free, self.rows = deque(range(self.num_pages)), deque(range(self.num_rows))
        self.pages, self.committed, self.kept = {}, {}, set()

    @property
    def held(self):
        return self.kept.union(*self.pages.values())

    def let_go(self, pages):
        """Free those pages that have no holder any more, in their order."""
        self.free.extend(page for page in pages if page not in self.held)

    def whole_pages(self, row):
        return self.pages[row][: self.committed[row] // self.page_size]

    def open(self, row, _):
        if self.rows:
            assert self.pool.open() == self.rows[0]
            self.pages[self.rows[0]], self.committed[self.rows[0]] = [], 0
            self.rows.popleft()
            return "opened"
        with pytest.raises(OutOfSlots):
            self.pool.open()
        return "no row"

    def reserve(self, row, columns):
        columns %= self.num_pages * self.page_size + 2
        missing = max(0, -(-columns // self.page_size) - len(self.pages[row]))
        if columns > self.num_pages * self.page_size or missing > max(0, len(self.free) - self.num_pages + self.most):
            with pytest.raises(OutOfSlots):
                self.pool.reserve(row, columns)
            return "no slots"
        self.pool.reserve(row, columns)
        self.pages[row] += [self.free.popleft() for _ in range(missing)]
        return "reserved" if missing else None

    def mark_committed(self, row, columns):
        self.committed[row] += columns % (len(self.pages[row]) * self.page_size - self.committed[row] + 1)
        self.pool.mark_committed(row, self.committed[row])
        return "committed"

    def release(self, row, columns):
        columns %= self.num_pages * self.page_size
        self.pool.release(row, columns)
        gone = self.pages[row][-(-columns // self.page_size) :]
        del self.pages[row][-(-columns // self.page_size) :]
        self.committed[row] = min(self.committed[row], len(self.pages[row]) * self.page_size)
        self.let_go(gone)
        return "released" if gone else None

    def close(self, row, _):
        self.pool.close(row)
        gone = self.pages.pop(row)
        del self.committed[row]
        self.rows.append(row)
        self.let_go(gone)
        return "closed"

    def keep(self, row, _):
        fresh = [page for page in self.whole_pages(row) if page not in self.kept]
        self.pool.keep(fresh)
        self.kept.update(fresh)
        return "kept" if fresh else None

    def drop(self, _, count):
        pages = sorted(self.kept)[count % 3 :][:2]
        self.pool.drop(pages)
        self.kept.difference_update(pages)
        self.let_go(pages)
        return "dropped" if pages else None

    def share(self, row, count):
        """Start a new request with another's kept pages."""
        pages = self.whole_pages(row)[: 1 + count % 3]
        if not self.rows or not set(pages) <= self.kept:
            return None
        new = self.rows[0]
        self.open(row, 0)
        self.pool.share(new, pages)
        self.pages[new], self.committed[new] = list(pages), len(pages) * self.page_size
        return "shared" if pages else None

    def limit(self, _, slots):
        slots = max(0, self.num_pages * self.page_size - slots % (5 * self.page_size))
        self.most = slots // self.page_size
        self.pool.limit(slots)
        return "over the limit" if len(self.held) > self.most else "limited"

    def check(self):
        """Compare every query of the pool with the model."""
        pool, size = self.pool, self.page_size
        assert {row: list(pool.pages(row)) for row in self.pages} == self.pages
        assert {row: pool.committed_columns(row) for row in self.pages} == self.committed
        assert pool._allocator.free_pages() == tuple(self.free)
        assert pool.free_slots == (len(self.free) - self.num_pages + self.most) * size
        assert pool.free_rows == len(self.rows)
        slots = {
            row: [page * size + slot for page in pages for slot in range(size)] for row, pages in self.pages.items()
        }
        final = {page * size + slot for page in self.kept for slot in range(size)}
        final.update(*(slots[row][: self.committed[row]] for row in slots))
        for row, table in enumerate(pool.req_to_token.tolist()):
            owned = slots.get(row, [])
            assert table == owned + [-1] * (len(table) - len(owned))
        rows = {page: tuple(row for row in self.pages if page in self.pages[row]) for page in self.held}
        assert {each.page: (each.rows, each.is_kept) for each in pool.accounts()} == {
            page: (rows[page], page in self.kept) for page in rows
        }
        assert {page for page in rows if pool.is_idle(page)} == {
            page for page in rows if len(rows[page]) + (page in self.kept) == 1
        }
        numbers = dict(reserved=len(rows) * size - len(final), committed=len(final), cached=len(self.kept) * size)
        withheld = (self.num_pages - self.most) * size
        counts = usage(self.num_pages * size, **numbers, withheld=withheld, requests=len(self.pages))
        assert pool.audit() == pool.usage() == counts


VERBS = "open reserve mark_committed release close keep drop share limit".split()
HAPPENINGS = {
    "opened", "no row", "reserved", "no slots", "committed", "released", "closed", "kept", "dropped", "shared",
    "over the limit", "limited",
}  # fmt: skip


def test_random_calls_keep_the_accounting_of_a_model():
    """Every event occurs at least 20 times, also pages with three holders and pages that outlive their rows."""
    happened = Counter()

    @settings(max_examples=150)
    @given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(VERBS), *[st.integers(0, 99)] * 2), min_size=30))
    def run(page_size, program):
        model = Model(page_size)
        for verb, first, second in program:
            rows = sorted(model.pages)
            if rows or verb in ("open", "drop", "limit"):
                happened[getattr(model, verb)(rows[first % len(rows)] if rows else None, second)] += 1
            model.check()
            happened["two rows and kept"] += any(len(each.rows) > 1 and each.is_kept for each in model.pool.accounts())
            happened["kept alone"] += any(not each.rows for each in model.pool.accounts())
        for row in list(model.pages):
            model.close(row, 0)
        model.pool.drop(list(model.kept))
        assert model.pool.audit()["free"] == model.pool.num_slots

    run()
    assert min(happened[each] for each in HAPPENINGS | {"two rows and kept", "kept alone"}) >= 20, happened


def test_slots_broadcasts_rows_and_columns():
    pool = busy_pool()
    slots = pool.slots(torch.tensor([[1], [0]]), torch.tensor([0, 6, 7]))
    assert slots.tolist() == [[int(pool.req_to_token[row, column]) for column in (0, 6, 7)] for row in (1, 0)]


@pytest.mark.parametrize("row", [1, torch.tensor([1])], ids=["int", "tensor"])
def test_a_column_that_is_not_owned_is_an_error(row):
    """Row 1 owns columns 0 to 7.

    The engine passes tensors for batches and numbers for one request.
    """
    with pytest.raises(IndexError, match="row 1 of the request table owns no slot at column 8"):
        busy_pool().slots(row, torch.tensor([7, 8]))


def test_write_skips_slot_minus_one():
    buffer = numbered(5)
    rows = torch.full((3, 1, 3), 9.0)
    buffer.write(1, torch.tensor([3, -1, 0]), rows, -rows)
    assert buffer.keys[1, :, 0, 0].tolist() == [9, 1, 2, 9, 4]
    assert buffer.values[1, :, 0, 2].tolist() == [-9, -1, -2, -9, -4]
    assert buffer.keys[0, :, 0, 0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("source", "destination", "after"),
    [
        ([0, 1, 2], [1, 2, 3], [0, 0, 1, 2, 4, 5]),
        ([1, 2, 3], [0, 1, 2], [1, 2, 3, 3, 4, 5]),
        ([4, 5], [5, 4], [0, 1, 2, 3, 5, 4]),
        ([2, 2], [0, 5], [2, 1, 2, 3, 4, 2]),
        ([3], [3], [0, 1, 2, 3, 4, 5]),
        ([], [], [0, 1, 2, 3, 4, 5]),
    ],
)
def test_move_gathers_before_it_scatters(source, destination, after):
    buffer = numbered(6)
    buffer.move(torch.tensor(source, dtype=torch.int64), torch.tensor(destination, dtype=torch.int64))
    assert held(buffer) == after


def test_a_snapshot_is_taken_only_where_one_is_kept():
    target, draft = numbered(4), numbered(4)
    KVPool(target, None, 1, 1, 4).take_snapshot()
    KVPool(target, draft, 1, 1, 4).take_snapshot()
    assert draft.snapshot is None


def test_a_snapshot_holds_the_content_of_its_moment():
    buffer = numbered(4)
    buffer.keep_snapshot()
    buffer.move(torch.tensor([3]), torch.tensor([0]))
    KVPool(numbered(4), buffer, 1, 1, 4).take_snapshot()
    buffer.copy_(numbered(4))
    assert (held(buffer), held(buffer.snapshot)) == ([0, 1, 2, 3], [3, 1, 2, 3])
