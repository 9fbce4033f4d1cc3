"""Owners of KV: accepted requests run to their end, and idle ones are evicted in order."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specsim import SamplingParams, SpecConfig
from specsim.core.columns import release_uncommitted, reserve_lanes, reserve_tree, round_columns
from specsim.core.config import ServingConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine
from specsim.serving.requests import Request
from specsim.serving.reservations import Reservations
from specsim.serving.scheduler import Scheduler

MAX_LEN = 40
TREE = SpecConfig(topk=3, num_steps=2, num_draft_tokens=6, page_size=4, max_len=MAX_LEN)
SETTINGS = {
    "tree": TREE,
    "tree, pages of 1": replace(TREE, page_size=1),
    "tree, pages of 3": replace(TREE, topk=2, num_draft_tokens=4, page_size=3),
    "tree wider than its lanes": SpecConfig(2, 3, 11, page_size=4, max_len=MAX_LEN),
    "chain": SpecConfig(1, 3, 4, page_size=4, max_len=MAX_LEN),
    "plain": SpecConfig.plain(page_size=4, max_len=MAX_LEN),
}
BOTH = pytest.mark.parametrize("release", ["finish", "round"])


def make_request(request_id=0, length=6, max_tokens=4, first=0, **schedule) -> Request:
    prompt_ids = [first + index for index in range(length)]
    return Request(request_id, prompt_ids, SamplingParams(), frozenset(), max_tokens, **schedule)


def make_reservations(config=TREE, num_pages=30, prefix_cache=False, num_requests=6) -> tuple[Reservations, KVPool]:
    target, draft = (KVBuffer(KVLayout(1, 1, 1), num_pages * config.page_size, torch.float32) for _ in range(2))
    pool = KVPool(target, draft, config.page_size, num_requests, config.reserved_columns(config.max_len))
    return Reservations(pool, (config,), prefix_cache), pool


def books(pool: KVPool) -> tuple:
    return pool.accounts(), pool.usage(), pool.free_rows, pool.req_to_token.tolist(), pool.token_ids.tolist()


def admit(reservations: Reservations, *requests: Request) -> None:
    """Admit requests one by one and fill their prompts, after which the first token is known."""
    for number, request in enumerate(requests):
        assert reservations.admit(request, requests[:number])
        reservations.mark_committed(request, request.prefill_len)
        request.take([40 + request.request_id], [0.0])


def room(length: int) -> int:
    """Count the pages of the next round of a request of this many columns."""
    return TREE.reserved_columns(length) // 4


def a_session(reservations: Reservations, request_id: int, length: int = 6, first: int | None = None) -> Request:
    """Make a finished request that waits for its next turn."""
    first = 100 * (request_id + 1) if first is None else first
    request = make_request(request_id, length, max_tokens=1, first=first)
    admit(reservations, request)
    reservations.release(request, keep_session=True)
    return request


def lives(config: SpecConfig, request: Request, num_pages: int, counts=()) -> bool:
    """Check whether a request runs to its end solo in an empty pool.

    counts: tokens of its rounds, then 1 each.
    """
    reservations, pool = make_reservations(config, num_pages, num_requests=1)
    if not reservations.admit(request, []):
        return False
    reservations.mark_committed(request, request.prefill_len)
    request.take([0], [0.0])
    counts = iter(counts)
    while not request.finish_reason:
        if not reservations.make_room([request]):
            return False
        reservations.reserve([request])
        row, length, count = request.row, request.prefill_len, next(counts, 1)
        if config.release == "round":
            reserve_lanes(pool, [row], [length], config)
            reserve_tree(pool, [row], [length], config)
            release_uncommitted(pool, [row], [length + count], config)
        assert pool.owned_columns(row) >= length + (count if config.release == "round" else config.need)
        request.take([0] * count, [0.0] * count)
        reservations.mark_committed(request, request.prefill_len)
        pool.audit()
    reservations.release(request)
    return pool.audit()["free"] == pool.num_slots


def fewest_pages(config: SpecConfig, request: Request) -> int:
    """Find the smallest pool in which a request is accepted."""
    return next(
        pages for pages in range(1, 99) if make_reservations(config, pages)[0].rejection_reason(request) is None
    )


@BOTH
@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS)
def test_an_accepted_request_runs_and_one_page_less_is_refused(config, release):
    config = replace(config, release=release)
    for length in range(1, 14):
        for max_tokens in (1, 2, 3, 7):
            request = make_request(length=length, max_tokens=max_tokens)
            pages = fewest_pages(config, request)
            assert lives(config, request, pages)
            if pages > 1:
                slots = [number * config.page_size for number in (pages, pages - 1)]
                error = make_reservations(config, pages - 1)[0].rejection_reason(request)
                assert error.startswith(f"{length} prompt tokens and {max_tokens} new ones need ")
                assert error.endswith(f" need {slots[0]} slots, and the pool has {slots[1]}")


@given(
    st.sampled_from(list(SETTINGS.values())),
    st.sampled_from(["finish", "round"]),
    *[st.integers(1, 14)] * 2,
    st.lists(st.integers(1, 3), max_size=8),
)
def test_an_accepted_request_ends_whatever_its_rounds_accept(config, release, length, max_tokens, counts):
    config, counts = replace(config, release=release), [min(count, config.num_steps + 1) for count in counts]
    request = make_request(length=length, max_tokens=max_tokens)
    assert lives(config, request, fewest_pages(config, request), counts)


@BOTH
@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS)
def test_no_request_that_can_run_is_refused(config, release):
    """It ends too early with one page less, if every round accepts one token."""
    config = replace(config, release=release)
    for length in range(1, 14):
        for max_tokens in (1, 2, 3, 7):
            pages = fewest_pages(config, make_request(length=length, max_tokens=max_tokens))
            request = make_request(length=length, max_tokens=max_tokens)
            assert pages == 1 or not lives(config, request, pages - 1), (length, max_tokens, pages)


@BOTH
def test_a_prompt_of_max_len_cannot_run(release):
    reservations, _ = make_reservations(replace(TREE, release=release), 99)
    assert reservations.rejection_reason(make_request(length=MAX_LEN - 1, max_tokens=1)) is None
    for length in (MAX_LEN, MAX_LEN + 1):
        expected = f"a prompt of {length} tokens; at most 39, one less than max_len, can run"
        assert reservations.rejection_reason(make_request(length=length, max_tokens=MAX_LEN - length)) == expected


def make_prompt(length, first=1):
    return [(first + 7 * index) % 48 for index in range(length)]


def serve(pair, config, serving, requests, before_step=lambda _: None):
    """Run requests to their ends on the reference."""
    engine = load_engine(pair, config, EngineOptions("reference", torch.float64))
    with torch.inference_mode():
        scheduler = Scheduler(engine, serving, audits=True)
        for request in requests:
            scheduler.submit(request)
        while scheduler.is_busy:
            before_step(scheduler)
            scheduler.step()
            assert scheduler.step_index < 200
        scheduler.close()
    return scheduler


@pytest.mark.parametrize(
    ("release", "schedule", "prefix_cache"),
    [("finish", "sync", False), ("finish", "overlap", False), ("finish", "overlap", True), ("round", "sync", True)],
)
@pytest.mark.parametrize("name", ["tree", "chain", "plain"])
def test_a_request_ends_in_the_smallest_pool_that_accepts_it(check_solo, name, release, schedule, prefix_cache):
    """It runs solo, and after another request with the same prompt, whose prefix is kept."""
    pair, config = synthetic_pair(), replace(SETTINGS[name], release=release)
    params = SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True)
    first, second = (Request(number, make_prompt(9), params, frozenset(), 12) for number in range(2))
    pages = fewest_pages(config, first)
    serving = ServingConfig(schedule, max_running=2, num_slots=pages * config.page_size, prefix_cache=prefix_cache)
    serve(pair, config, serving, [first, second])
    assert [len(request.token_ids) for request in (first, second)] == [12, 12]
    check_solo([first, second], config, pair)
    request = Request(0, make_prompt(9), params, frozenset(), 12)
    if pages > 1:
        serve(pair, config, replace(serving, num_slots=(pages - 1) * config.page_size), [request])
        assert (request.finish_reason, request.token_ids) == ("rejected", [])


@BOTH
def test_admission_needs_the_prefill_and_every_next_round(release):
    """Release `finish` reserves two rounds ahead at once, `round` only the prompt."""
    config = replace(TREE, release=release)
    request, other = make_request(0), make_request(1)
    pages = -(-round_columns(6, config) // 4)
    reservations, pool = make_reservations(config, 2 * pages)
    admit(reservations, request)
    assert pool.owned_columns(request.row) == (config.reserved_columns(6) if release == "finish" else 8)
    assert reservations.admit(other, [request])
    for request_ in (request, other):
        reservations.release(request_)
    reservations, pool = make_reservations(config, 2 * pages - 1)
    first, second = make_request(0), make_request(1)
    admit(reservations, first)
    before = books(pool)
    assert not reservations.admit(second, [first])
    assert books(pool) == before
    assert second.row == -1


@BOTH
@pytest.mark.parametrize("config", SETTINGS.values(), ids=SETTINGS)
def test_least_slots_is_the_smallest_limit_that_admits(config, release):
    config = replace(config, release=release)
    for length in range(1, 14):
        request, (reservations, pool) = make_request(length=length), make_reservations(config)
        least = reservations.least_slots(request)
        for num_slots in (least - config.page_size, least):
            pool.limit(num_slots)
            assert reservations.admit(request, []) == (num_slots == least)


def test_a_failed_admission_releases_the_shared_prefix():
    reservations, pool = make_reservations(num_pages=room(9) + room(12) - 3, prefix_cache=True)
    first, second = make_request(0, length=9), make_request(1, length=12)
    admit(reservations, first)
    before = books(pool)
    assert not reservations.admit(second, [first])
    assert books(pool) == before
    assert (second.row, reservations.committed(first)) == (-1, 9)
    pool.limit(0)
    pool.limit(pool.num_slots)
    reservations.release(first)
    assert reservations.admit(second, [])
    assert reservations.committed(second) == 8


def test_a_failed_admission_keeps_the_session():
    reservations, pool = make_reservations(num_pages=room(6) + room(8) - 1)
    session = a_session(reservations, 0)
    other = make_request(1)
    admit(reservations, other)
    turn = make_request(2, length=2, max_tokens=1, continues=0)
    turn.follow(session)
    turn.fit(MAX_LEN)
    row, before = session.row, books(pool)
    assert not reservations.admit(turn, [other])
    assert books(pool) == before
    assert (session.row, turn.row) == (row, -1)
    reservations.release(other)
    assert reservations.admit(turn, [])
    assert (session.row, turn.row, reservations.committed(turn)) == (-1, row, 6)
    assert not reservations.end_session(0)
    pool.audit()


def test_a_failed_admission_costs_no_prefix_and_no_session():
    """Even after all evictions there would be no room, so nothing is evicted."""
    reservations, pool = make_reservations(num_pages=room(9) + room(30) - 1, prefix_cache=True)
    session = a_session(reservations, 0, length=9)
    running, waiting = make_request(1, length=9, first=50), make_request(2, length=30, max_tokens=1, first=200)
    admit(reservations, running)
    before = books(pool)
    assert not reservations.admit(waiting, [running])
    assert books(pool) == before
    assert session.row >= 0


def test_a_failed_admission_spends_nothing_for_pages_that_stay():
    """The first of two requests with one prompt keeps a page in the tree, above a page of the second."""
    reservations, pool = make_reservations(num_pages=60, prefix_cache=True)
    first, running, waiting = make_request(0, length=5), make_request(1, length=9), make_request(2, first=50)
    assert reservations.admit(first, [])
    assert reservations.admit(running, [first])
    reservations.mark_committed(first, 5)
    reservations.mark_committed(running, 9)
    reservations.release(first)
    session = a_session(reservations, 3)
    pool.limit((room(9) + room(6)) * 4)
    before = books(pool)
    assert not reservations.admit(waiting, [running])
    assert books(pool) == before
    assert session.row >= 0
    pool.limit((room(9) + 1 + room(6)) * 4)
    assert reservations.admit(waiting, [running])
    pool.audit()


def test_a_turn_appends_to_the_kv_of_its_session():
    reservations, pool = make_reservations()
    session = a_session(reservations, 0)
    pages = pool.pages(session.row)
    assert (len(pages), pool.audit()["committed"]) == (2, 6)  # and not what was reserved for its rounds
    turn = make_request(1, length=3, max_tokens=1, continues=0)
    turn.follow(session)
    turn.fit(MAX_LEN)
    assert reservations.admit(turn, [])
    assert pool.pages(turn.row)[:2] == pages
    assert pool.owned_columns(turn.row) == TREE.reserved_columns(10)
    assert reservations.committed(turn) == 6
    reservations.release(turn)
    assert pool.audit()["free"] == pool.num_slots


def test_the_oldest_session_ends_first_where_slots_run_out():
    reservations, pool = make_reservations()
    sessions = {number: a_session(reservations, number) for number in (5, 2, 7)}
    for free, alive in [(0, [5, 2, 7]), (1, [2, 7]), (2, [2, 7]), (3, [7]), (6, [])]:
        pool.limit((room(1) + 6 - free) * 4)
        assert reservations.make_room([])
        request = make_request(9, length=1)
        assert reservations.admit(request, [])
        assert [number for number, session in sessions.items() if session.row >= 0] == alive
        reservations.release(request)


def test_the_oldest_session_ends_first_where_rows_run_out():
    reservations, pool = make_reservations(num_pages=60, num_requests=4)
    sessions = {number: a_session(reservations, number) for number in (5, 2, 7)}
    requests = []
    for alive in ([5, 2, 7], [2, 7], [7], []):
        requests.append(make_request(10 + len(requests), length=1))
        assert reservations.admit(requests[-1], requests[:-1])
        assert [number for number, session in sessions.items() if session.row >= 0] == alive
    before = books(pool)
    assert not reservations.admit(make_request(20, length=1), requests)
    assert books(pool) == before


def test_prefixes_are_evicted_before_sessions():
    """A session has three pages, two of them shared.

    Two other pages are unused.
    """
    reservations, pool = make_reservations(prefix_cache=True)
    session, past = a_session(reservations, 0, length=9), make_request(1, length=9, first=50)
    admit(reservations, past)
    reservations.release(past)
    assert pool.usage()["cached"] == 16
    for pages, expected in [(5, (True, 16, 0)), (4, (True, 12, 1)), (3, (True, 8, 2)), (2, (False, 8, 2))]:
        pool.limit((room(1) + pages) * 4)
        request = make_request(2, length=1, first=90)
        assert reservations.admit(request, [])
        assert (session.row >= 0, pool.usage()["cached"], reservations.evicted_pages) == expected
        reservations.release(request)


def test_room_is_made_for_the_next_round_of_every_resident():
    """Under release `round` they own little between rounds, but all of them must fit at the same time."""
    config = replace(TREE, release="round")
    reservations, pool = make_reservations(config, num_pages=2 * 6)
    assert -(-round_columns(3, config) // 4) == 6
    first, second, third = (make_request(number, length=3, first=50 * number) for number in range(3))
    admit(reservations, first, second)
    assert pool.usage()["free"] == 10 * 4
    assert reservations.make_room([first, second])
    assert not reservations.admit(third, [first, second])
    pool.limit(12 * 4 - 1)
    assert not reservations.make_room([first, second])
    assert reservations.make_room([first])


def test_at_least_one_column_of_a_known_prompt_is_computed():
    """The first round starts from the hidden state of its last token."""
    reservations, pool = make_reservations(num_pages=40, prefix_cache=True)
    for number, (length, reused) in enumerate([(9, 0), (9, 8), (8, 4), (5, 4), (4, 0)]):
        request = make_request(number, length)
        assert reservations.admit(request, [])
        assert reservations.committed(request) == reused
        assert pool.token_ids[request.row].tolist() == [*range(reused)] + [-1] * (pool.token_ids.shape[1] - reused)
        reservations.mark_committed(request, length)
        request.take([length], [0.0])  # the token that follows in the longer prompts too
        reservations.mark_committed(request, length)
        reservations.release(request)
        assert reservations.admit(request, [])  # again, with a token of its own
        assert reservations.committed(request) == (length - 1) // 4 * 4
        reservations.release(request)
    reservations.close()
    assert pool.audit()["free"] == pool.num_slots


def test_close_ends_every_session_and_keeps_no_prefix():
    reservations, pool = make_reservations(num_pages=30, prefix_cache=True)
    sessions = [a_session(reservations, number, length=9) for number in range(2)]
    assert pool.usage()["cached"] == 16
    assert reservations.end_session(1)
    assert not reservations.end_session(1)
    assert not reservations.end_session(77)
    reservations.close()
    assert [session.row for session in sessions] == [-1, -1]
    assert pool.audit()["free"] == pool.num_slots
    assert pool.free_rows == 6


PENALTIES = {
    "repetition": SamplingParams(repetition_penalty=3.0, max_new_tokens=12, temperature=1.0, seed=3),
    "presence and frequency": SamplingParams(presence_penalty=1.5, frequency_penalty=1.0, max_new_tokens=12),
}


@pytest.mark.parametrize("params", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("schedule", ["sync", "overlap"])
def test_penalties_count_the_tokens_of_a_reused_prefix(check_solo, params, schedule):
    """The tokens are another's prompt, the request's own output after a preemption, and the turn before."""
    pair = synthetic_pair()
    prompts = [make_prompt(13), make_prompt(17)]
    first, second = (Request(number, prompts[number], params, frozenset(), 12) for number in range(2))
    second.arrival = 14  # the first has ended by then
    turn = Request(2, [4, 5], params, frozenset(), 12, continues=1)

    def preempt_once(scheduler):
        """Preempt once, by one page too few for the second request when it has decoded for a while."""
        gives_way = len(second.token_ids) >= 6 and not second.num_preemptions
        scheduler.limit(64 if gives_way else 400)

    serving, config = ServingConfig(schedule, num_slots=400, prefix_cache=True), replace(TREE, max_len=64)
    scheduler = serve(pair, config, serving, [first, second, turn], preempt_once)
    reused = [(request_id, number) for record in scheduler.trace.records for request_id, number in record.reused]
    assert reused[:2] == [(1, 12), (1, 20)]  # the first's prompt, then 17 tokens of its own prompt and 3 of its output
    assert reused[2] == (2, len(turn.prompt_ids) - 3)  # all but its own turn and the token before
    check_solo([first, second, turn], config, pair)


def test_a_refused_request_ends_no_session_for_a_row():
    reservations, pool = make_reservations()
    sessions = [a_session(reservations, number) for number in range(pool.free_rows)]
    assert pool.free_rows == 0
    pool.limit(sum(len(pool.pages(session.row)) for session in sessions[:1]) * pool.page_size)
    assert not reservations.admit(make_request(50, length=30), [])
    assert all(session.row >= 0 for session in sessions)


def test_usage_is_the_pools_without_a_list_of_pages(monkeypatch):
    reservations, pool = make_reservations()
    first, second = make_request(0, 9), make_request(1, 6)
    admit(reservations, first, second)
    pool.limit(100)
    expected = pool.usage()
    assert expected["committed"] == 15
    reservations.release(second, keep_session=True)
    kept = pool.usage()
    with monkeypatch.context() as patch:
        patch.setattr(pool, "accounts", lambda: pytest.fail("a list of all pages"))
        assert reservations.usage() == kept
    reservations.end_session(second.request_id)
    reservations.release(first)
    assert reservations.usage() == pool.usage()
    assert reservations.usage()["requests"] == 0
    pool.reserve(pool.open(), 4)  # of a row that is not theirs
    assert reservations.usage() == pool.usage()
