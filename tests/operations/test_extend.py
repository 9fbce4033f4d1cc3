"""Rows of draft-extend, with ids one position after their features, by hand and through the engine."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch, DraftExtendInput, PrefillInput, Verdict
from specsim.fast.kv import extend as fast
from specsim.reference.kv import draft_extend_input, shift_left

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def prefill_input(chunks: list[list[int]], starts: list[int], next_tokens: list[int]) -> PrefillInput:
    counts = torch.tensor([len(chunk) for chunk in chunks], dtype=torch.int64)
    return PrefillInput(
        input_ids=torch.tensor([token for chunk in chunks for token in chunk], dtype=torch.int64),
        row_starts=torch.nn.functional.pad(counts.cumsum(0), (1, 0)),
        start_lens=torch.tensor(starts, dtype=torch.int64),
        next_tokens=torch.tensor(next_tokens, dtype=torch.int64),
    )


@pytest.mark.parametrize(
    ("chunks", "next_tokens", "expected"),
    [
        ([[1, 2, 3]], [4], [2, 3, 4]),
        ([[1]], [4], [4]),
        ([[1, 2, 3], [5], [7, 8]], [4, 6, 9], [2, 3, 4, 6, 8, 9]),
        ([], [], []),
    ],
)
def test_shift_left_ends_with_the_token_after_the_chunk(chunks, next_tokens, expected):
    prefill = prefill_input(chunks, [0] * len(chunks), [-1] * len(chunks))
    before = prefill.input_ids.clone()
    shifted = shift_left(prefill, torch.tensor(next_tokens, dtype=torch.int32))
    assert shifted.tolist() == expected
    assert shifted.dtype == torch.int64
    assert torch.equal(prefill.input_ids, before)


@pytest.mark.parametrize("sizes", [(9,), (4, 5), (1, 1, 7), (8, 1)])
def test_the_chunks_of_a_prompt_shift_as_the_whole_prompt_does(sizes):
    """A chunk that is not the last ends with the next known token, never with a sampled one."""
    sequence, start, ids = [*range(10, 19), 3], 0, []
    for size in sizes:
        chunk, known = sequence[start : start + size], sequence[start + size]
        ids += shift_left(prefill_input([chunk], [start], [known]), torch.tensor([known], dtype=torch.int32)).tolist()
        start += size
    assert ids == sequence[1:]


# By hand: two requests of six nodes and three steps. Node g of the batch predicts 100 + g and has features [g, -g].

PATHS = [[0, 2, 5], [0]]


def make_batch(lengths: list[int], rows: list[int] | None = None, prompt_lens: list[int] | None = None) -> Batch:
    params = [SamplingParams()] * len(lengths)
    rows, prompt_lens = rows or range(len(lengths)), prompt_lens or lengths
    batch = Batch.of(range(len(lengths)), rows, prompt_lens, params, vocab_size=48)
    return replace(batch, seq_lens=torch.tensor(lengths, dtype=torch.int64))


def make_verdict(paths: list[list[int]], num_nodes: int = 6, num_steps: int = 3) -> Verdict:
    predict = torch.full((len(paths) * num_nodes,), -1, dtype=torch.int32)
    accept_index = torch.full((len(paths), num_steps + 1), -1, dtype=torch.int32)
    for request, path in enumerate(paths):
        for step, node in enumerate(path):
            accept_index[request, step] = request * num_nodes + node
            predict[request * num_nodes + node] = 100 + request * num_nodes + node
    drafts = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32)
    return Verdict(predict, accept_index, drafts, drafts + 1, torch.zeros(len(paths), num_steps + 1))


def numbered_features(count: int) -> torch.Tensor:
    return torch.stack([torch.arange(count), -torch.arange(count)], dim=1).double()


def table() -> torch.Tensor:
    """Make a table with slot 1000 · row + column."""
    return torch.arange(3)[:, None] * 1000 + torch.arange(40)


def extended(extend: str, max_len: int = 100, req_to_token: torch.Tensor | None = None) -> DraftExtendInput:
    """Extend request 0 in table row 2 with 7 tokens, and request 1 in table row 0 with 11."""
    req_to_token = table() if req_to_token is None else req_to_token
    batch = make_batch([7, 11], rows=[2, 0])
    return draft_extend_input(batch, make_verdict(PATHS), numbered_features(12), req_to_token, max_len, extend)


ROWS = {  # row_starts, input_ids, hidden, positions, cache_locations, last_rows
    "ragged": ([0, 3, 4], [100, 102, 105, 106], [0, 2, 5, 6], [7, 8, 9, 11], [2007, 2008, 2009, 11], [2, 3]),
    # Padding has token 0 and the features of the request's own node 0.
    "fixed": (
        [0, 4, 8], [100, 102, 105, 0, 106, 0, 0, 0], [0, 2, 5, 0, 6, 6, 6, 6], [7, 8, 9, 10, 11, 12, 13, 14],
        [2007, 2008, 2009, 2010, 11, 12, 13, 14], [2, 4],
    ),
}  # fmt: skip


@pytest.mark.parametrize("extend", ROWS)
def test_a_row_holds_the_token_after_its_node(extend):
    """It is not the node's own token: root and drafts are as many as drafts and bonus."""
    rows = extended(extend)
    row_starts, input_ids, hidden, *others = ROWS[extend]
    assert (rows.row_starts.tolist(), rows.input_ids.tolist()) == (row_starts, input_ids)
    assert rows.hidden.tolist() == [[number, -number] for number in hidden]
    assert [each.tolist() for each in (rows.positions, rows.cache_locations, rows.last_rows)] == others


@pytest.mark.parametrize("num_accepted_drafts", [0, 1, 2, 3])
def test_the_bonus_token_is_right_at_every_length_of_the_path(num_accepted_drafts):
    paths = [[0, 1, 3, 5][: num_accepted_drafts + 1], [0, 2, 4, 5][: 4 - num_accepted_drafts]]
    batch, verdict = make_batch([7, 11]), make_verdict(paths)
    rows = draft_extend_input(batch, verdict, numbered_features(12), table(), 100, "fixed")
    assert rows.bonus_tokens.tolist() == [100 + paths[0][-1], 106 + paths[1][-1]]


@pytest.mark.parametrize("extend", ["fixed", "ragged"])
def test_the_batchs_lengths_rows_and_both_counters_are_handed_on(extend):
    rows = extended(extend)
    assert rows.num_accepted_drafts.tolist() == [2, 0]
    assert rows.num_accepted_tokens.tolist() == [3, 1]
    assert rows.seq_lens.tolist() == [7, 11]
    assert rows.req_pool_indices.tolist() == [2, 0]


def test_rows_without_a_slot_or_at_the_limit_write_nothing():
    req_to_token = table()
    req_to_token[2, 10:] = -1
    rows = extended("fixed", max_len=13, req_to_token=req_to_token)
    assert rows.cache_locations.tolist() == [2007, 2008, 2009, -1, 11, 12, -1, -1]


@pytest.mark.parametrize("num_nodes", [4, 6])
@pytest.mark.parametrize("extend", ["fixed", "ragged"])
def test_no_requests_make_no_rows(extend, num_nodes):
    verdict = make_verdict([], num_nodes)
    rows = draft_extend_input(make_batch([]), verdict, torch.empty(0, 2), table(), 100, extend)
    assert rows.row_starts.tolist() == [0]
    assert rows.hidden.shape == (0, 2)
    for field in fields(rows):
        if field.name not in ("row_starts", "hidden"):
            assert getattr(rows, field.name).shape == (0,), field.name
    for name in ("input_ids", "positions", "cache_locations", "last_rows", "row_starts"):
        assert getattr(rows, name).dtype == torch.int64
    assert rows.bonus_tokens.dtype == torch.int32


# The fast implementation.


GPU_BLOCKS = {fast: 2}


def random_case(size: int, num_steps: int, num_features: int, dtype: torch.dtype = torch.float32):
    """Make (batch, verdict, features, table): random paths below roots, in a table that has unused rows."""
    num_nodes = num_steps + 3
    paths = []
    for length in torch.randint(1, num_steps + 2, (size,)).tolist():
        paths.append([0, *sorted((torch.randperm(num_nodes - 1)[: length - 1] + 1).tolist())])
    rows = torch.randperm(size + 2)[:size].tolist()
    batch = make_batch(torch.randint(1, 30, (size,)).tolist(), rows=rows or None)
    table = torch.randint(-1, 10**6, (size + 2, 40))
    features = torch.randn(size * num_nodes, num_features).to(dtype)
    return batch, make_verdict(paths, num_nodes, num_steps), features, table


def fast_rows(case, max_len: int, extend: str, device: str) -> DraftExtendInput:
    batch, verdict, features, table = case
    inputs = batch.to(device), verdict.to(device), features.to(device), table.to(device)
    return fast.draft_extend_input(*inputs, max_len, extend).to("cpu")


def accepted_only(rows: DraftExtendInput, width: int) -> DraftExtendInput:
    """Pack the rows of every path."""
    live = (torch.arange(width) < rows.num_accepted_tokens[:, None]).flatten()
    taken = {name: getattr(rows, name)[live] for name in ("hidden", "input_ids", "positions", "cache_locations")}
    starts = torch.nn.functional.pad(rows.num_accepted_tokens.long().cumsum(0), (1, 0))
    return replace(rows, **taken, row_starts=starts)


def check_rows(rows: DraftExtendInput, expected: DraftExtendInput) -> None:
    for field in fields(expected):
        one, other = getattr(rows, field.name), getattr(expected, field.name)
        assert one.dtype == other.dtype, field.name
        assert torch.equal(one, other), field.name


def check_case(case, max_len: int, device: str) -> None:
    width = case[1].accept_index.shape[1]
    expected = draft_extend_input(*case, max_len, "fixed")
    check_rows(fast_rows(case, max_len, "fixed", device), expected)
    ragged = fast_rows(case, max_len, "ragged", device)
    check_rows(accepted_only(ragged, width), draft_extend_input(*case, max_len, "ragged"))
    junk = (torch.arange(width) >= expected.num_accepted_tokens[:, None]).flatten()
    check_rows(ragged, replace(expected, cache_locations=torch.where(junk, -1, expected.cache_locations)))


@pytest.mark.parametrize("max_len", [100, 17])
@pytest.mark.parametrize("num_steps", [0, 1, 3, 7])
@pytest.mark.parametrize(("size", "num_features"), [(0, 3), (1, 1), (3, 17), (5, 5)])
def test_fast_rows_are_the_references(size, num_steps, num_features, max_len, device, gpu_blocks, program_order):
    check_case(random_case(size, num_steps, num_features), max_len, device)


@given(st.integers(0, 6), st.integers(0, 9), st.integers(1, 40), st.integers(1, 45))
@settings(max_examples=25)
def test_fast_rows_are_the_references_at_any_setting(size, num_steps, num_features, max_len):
    check_case(random_case(size, num_steps, num_features), max_len, DEVICE)


@pytest.mark.parametrize("extend", ["fixed", "ragged"])
def test_fast_rows_beyond_the_table_write_nothing(extend, device):
    """Row 0 of a table of nine columns precedes row 1 in memory."""
    narrow = torch.arange(18).view(2, 9)
    case = make_batch([7], rows=[0]), make_verdict([[0, 2, 3, 5]]), numbered_features(6), narrow
    assert fast_rows(case, 100, extend, device).cache_locations.tolist() == [7, 8, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_fast_rows_keep_the_features_bits(dtype, device):
    check_case(random_case(3, 4, 1025, dtype), 100, device)


@pytest.mark.parametrize("extend", ["fixed", "ragged"])
def test_padded_requests_have_rows_of_zeros_that_write_nothing(extend, device, gpu_blocks, program_order):
    batch, verdict, features, table = case = random_case(3, 2, 5)
    width, num_nodes = 3, 5
    padded = torch.tensor([0, 1, 2, 0, 0])
    more, most = batch.filter(padded), torch.cat([verdict.accept_index, torch.full((2, width), -1, dtype=torch.int32)])
    more = replace(more, req_pool_indices=batch.req_pool_indices[padded], seq_lens=batch.seq_lens[padded])
    more.req_pool_indices[3:], more.seq_lens[3:] = -1, 0
    counts = torch.cat([verdict.num_accepted_drafts, torch.zeros(2, dtype=torch.int32)])
    predict = torch.cat([verdict.predict, torch.full((2 * num_nodes,), -1, dtype=torch.int32)])
    bigger = replace(
        verdict, predict=predict, accept_index=most, num_accepted_drafts=counts, num_accepted_tokens=counts + 1
    )
    junk = torch.full((2 * num_nodes, 5), torch.nan)
    rows = fast_rows((more, bigger, torch.cat([features, junk]), table), 100, extend, device)
    alone = fast_rows(case, 100, extend, device)
    for name in ("hidden", "input_ids", "positions", "cache_locations"):
        own, padding = getattr(rows, name)[: 3 * width], getattr(rows, name)[3 * width :]
        assert torch.equal(own, getattr(alone, name)), name
        assert (padding == (-1 if name == "cache_locations" else 0)).all(), name
    assert rows.row_starts.tolist() == [0, 3, 6, 9, 12, 15]
    assert rows.num_accepted_tokens.tolist() == (counts + 1).tolist()
    assert rows.bonus_tokens.tolist() == [*alone.bonus_tokens.tolist(), 0, 0]
    assert rows.req_pool_indices.tolist()[3:] == [-1, -1]


def test_fast_rows_are_written_into_given_buffers(device):
    """Every entry is written, also the copied counters and lengths.

    No output shares memory with an input.
    """
    batch, verdict, features, table = (value.to(device) for value in random_case(3, 2, 5))
    expected = fast.draft_extend_input(batch, verdict, features, table, 100, "fixed")
    out = replace(
        expected, **{field.name: torch.empty_like(getattr(expected, field.name)) for field in fields(expected)}
    )
    assert fast.draft_extend_input(batch, verdict, features, table, 100, "fixed", out=out) is out
    check_rows(out, expected)
    assert out.seq_lens.data_ptr() != batch.seq_lens.data_ptr()


@given(st.lists(st.integers(1, 9), max_size=5))
@settings(max_examples=15)
def test_fast_shift_left_is_the_references(sizes):
    prefill = prefill_input([torch.randint(0, 99, (size,)).tolist() for size in sizes], sizes, [-1] * len(sizes))
    next_tokens = torch.randint(0, 99, (len(sizes),), dtype=torch.int32)
    shifted = fast.shift_left(prefill.to(DEVICE), next_tokens.to(DEVICE))
    assert shifted.dtype == torch.int64
    assert torch.equal(shifted.cpu(), shift_left(prefill, next_tokens))


@pytest.mark.parametrize("sizes", [[1], [1024, 1, 1025], [5, 2, 3]])
def test_fast_shift_left_of_long_chunks(sizes, device, program_order, monkeypatch):
    monkeypatch.setattr(fast, "block_of", lambda count, on_gpu, others=1: on_gpu)
    prefill = prefill_input([torch.randint(0, 99, (size,)).tolist() for size in sizes], sizes, [-1] * len(sizes))
    next_tokens = torch.randint(0, 99, (len(sizes),), dtype=torch.int32)
    shifted = fast.shift_left(prefill.to(device), next_tokens.to(device))
    assert torch.equal(shifted.cpu(), shift_left(prefill, next_tokens))
