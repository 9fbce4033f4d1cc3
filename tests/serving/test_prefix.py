"""The prefix tree: pages with which a prompt may begin, and their order of eviction."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.serving.prefix import PrefixTree

P = 4
TEXT = list(range(100, 117))


def make_pool(has_draft: bool = True, page_size: int = P, num_pages: int = 16, num_requests: int = 8) -> KVPool:
    target, draft = (KVBuffer(KVLayout(1, 1, 1), num_pages * page_size, torch.float32) for _ in range(2))
    return KVPool(target, draft if has_draft else None, page_size, num_requests, num_pages * page_size)


def filled(pool: KVPool, columns: int, shared=()) -> int:
    """Make a row with this many owned and committed columns, the first of them on shared pages."""
    row = pool.open()
    pool.share(row, shared)
    pool.reserve(row, columns)
    pool.mark_committed(row, columns)
    return row


def grown(pool: KVPool, tree: PrefixTree, token_ids, columns: int | None = None, shared=()) -> int:
    """Make a row whose committed columns (by default all but the last token) are in the tree."""
    columns = len(token_ids) - 1 if columns is None else columns
    row = filled(pool, columns, shared)
    tree.insert(token_ids, columns, pool.pages(row))
    return row


def test_the_last_page_of_a_tree_is_evicted_from_a_full_pool():
    pool = make_pool(num_pages=2)
    tree = PrefixTree(pool)
    idle = grown(pool, tree, TEXT[:5])
    filled(pool, 4)
    pool.close(idle)
    assert pool.audit()["free"] == 0
    assert tree.evict(9) == 1


def test_clear_drops_kept_pages_and_no_requests_pages():
    pool = make_pool()
    tree = PrefixTree(pool)
    row = grown(pool, tree, TEXT)
    pool.close(grown(pool, tree, TEXT[3:]))
    tree.clear()
    assert tree.match(TEXT, 16) == tree.match(TEXT[3:], 12) == []
    assert pool.audit()["cached"] == 0
    assert pool.committed_columns(row) == 16
    pool.close(row)
    assert pool.audit()["free"] == 64
    tree.clear()
    assert tree.evict(1) == 0


class Model:
    """All kept prefixes by their tokens (with those that draft KV depends on), with page and last match.

    With draft KV, slot p depends on tokens 0 to p + 1 + lookahead. The last `lookahead` columns are written again.
    """

    def __init__(self, page_size: int, has_draft: bool, lookahead: int):
        self.page_size, self.lookahead, self.next_tokens, self.clock = page_size, lookahead, has_draft + lookahead, 0
        self.pages: dict[tuple[int, ...], int] = {}
        self.met: dict[tuple[int, ...], int] = {}

    def prefixes(self, token_ids, columns):
        """List the tokens that identify each whole page, in order."""
        ends = range(self.page_size, columns + 1, self.page_size)
        return [tuple(token_ids[: end + self.next_tokens]) for end in ends if end + self.next_tokens <= len(token_ids)]

    def match(self, token_ids, columns):
        self.clock += 1
        known = [each for each in self.prefixes(token_ids, columns) if each in self.pages]
        self.met.update(dict.fromkeys(known, self.clock))
        return [self.pages[each] for each in known]

    def insert(self, token_ids, columns, pages):
        columns -= self.lookahead
        self.match(token_ids, columns)
        for prefix, page in zip(self.prefixes(token_ids, columns), pages, strict=False):
            if prefix not in self.pages:
                self.pages[prefix], self.met[prefix] = page, self.clock

    def evict(self, num_pages, held):
        """Evict pages, one by one the leaf that was matched longest ago, and list them."""
        gone = []
        while len(gone) < num_pages:
            inner = {longer[: len(longer) - self.page_size] for longer in self.pages}
            leaves = [each for each, page in self.pages.items() if each not in inner and page not in held]
            if not leaves:
                break
            oldest = min(leaves, key=self.met.get)
            gone.append(self.pages.pop(oldest))
        return gone


def evict(pool: KVPool, tree: PrefixTree, model: Model, rows, count: int) -> int:
    """Evict from both, compare the pages, and check that no row uses them.

    Return their number.
    """
    held = {page for row in rows for page in pool.pages(row)}
    before = {account.page for account in pool.accounts()}
    gone = model.evict(count, held)
    assert tree.evict(count) == len(gone)
    assert before - {account.page for account in pool.accounts()} == set(gone)
    return len(gone)


def test_random_requests_match_a_dict_of_all_prefixes():
    """A request begins with the pages found, grows, and closes.

    Pages are evicted in between.
    """
    happened = Counter()
    token_ids = st.lists(st.integers(0, 1), min_size=1, max_size=14)
    program = st.lists(st.tuples(st.integers(0, 9), token_ids, st.integers(0, 99)), min_size=10, max_size=40)

    @settings(max_examples=200)
    @given(st.integers(1, 3), st.sampled_from([(False, 0), (True, 0), (True, 1), (True, 2)]), program)
    def run(page_size, draft_kv, program):
        has_draft, lookahead = draft_kv
        pool = make_pool(has_draft, page_size, num_pages=14 * 40)  # room for every program
        tree, model, open_rows = PrefixTree(pool, lookahead), Model(page_size, has_draft, lookahead), {}
        for choice, tokens, number in program:
            if choice == 0:
                num_evicted = evict(pool, tree, model, open_rows, 1 + number % 9)
                happened["evicted"] += num_evicted
                if num_evicted < 1 + number % 9:
                    happened["held back"] += bool(model.pages)
                    held = {page for row in open_rows for page in pool.pages(row)}
                    assert tree.pages_above(held) == set(model.pages.values())
            elif choice <= 2 and open_rows:
                row = list(open_rows)[number % len(open_rows)]
                del open_rows[row]
                pool.close(row)
            elif choice <= 4 and open_rows:  # more tokens are known and committed
                row = list(open_rows)[number % len(open_rows)]
                tokens = open_rows[row] = open_rows[row] + tokens[:5]
                committed = pool.committed_columns(row)
                columns = committed + number % (len(tokens) - committed + 1)
                pool.reserve(row, columns)
                pool.mark_committed(row, columns)
                happened["grown"] += 1
                model.insert(tokens, columns, pool.pages(row))
                tree.insert(tokens, columns, pool.pages(row))
            elif pool.free_rows:
                found = tree.match(tokens, number % 16)
                assert found == model.match(tokens, number % 16)
                happened["found"] += bool(found)
                row = filled(pool, len(tokens), found)
                open_rows[row] = tokens
                happened["filled twice"] += len(found) < len(model.prefixes(tokens, 16))
                model.insert(tokens, len(tokens), pool.pages(row))
                tree.insert(tokens, len(tokens), pool.pages(row))
            assert {account.page for account in pool.accounts() if account.is_kept} == set(model.pages.values())
            assert pool.audit()["cached"] == len(model.pages) * page_size
        tree.clear()
        for row in open_rows:
            pool.close(row)
        assert pool.audit()["free"] == pool.num_slots

    run()
    assert min(happened[each] for each in ("evicted", "held back", "grown", "found", "filled twice")) >= 100, happened
