"""The differential test reports wrong KV, stray writes, wrong tables, and writes to states."""

import pytest

from specsim.core.pool import lane_columns, tail_columns
from specsim.correctness.differential.cell import cell_of

CELL = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3))


def slot_of(batch, pools, column, request=1):
    return int(pools.req_to_token[batch.req_pool_indices[request], column])


def touch(buffer, name, column_of):
    """Spoil the KV of one column of request 1, in the last layer."""

    def spoil(output, batch, pools):
        length = int(batch.seq_lens[1])
        slot = slot_of(batch, pools, column_of(length))
        getattr(getattr(pools, buffer), name)[-1, slot, -1, -1] += 1e-3

    return spoil


def lane(length):
    return int(lane_columns(length, CELL.config)[2, 1])


def tail(length):
    columns = tail_columns(length, CELL.config)
    return int(columns[3, -1]) if columns.numel() else lane(length)


KV_WRITES = {
    "a prompt's KV": ("prefill", "target", lambda length: 0),
    "the prompt's last KV": ("prefill", "draft", lambda length: length - 1),
    "a lane": ("draft", "draft", lane),
    "a tail's copy": ("draft", "draft", tail),
    "the root's KV": ("verify", "target", lambda length: length),
    "the prefix in verify": ("verify", "target", lambda length: length - 1),
    "the prefix in draft-extend": ("draft_extend", "draft", lambda length: length - 1),
    "an accepted row": ("draft_extend", "draft", lambda length: length),
}
STRAY = {
    "verify writes to the draft pool": ("verify", "draft", lambda length: length),
    "verify writes behind the tree": ("verify", "target", lambda length: length + 8),
    "draft writes to the target pool": ("draft", "target", lambda length: length),
    "draft writes to the prefix": ("draft", "draft", lambda length: 0),
    "draft-extend writes to the target pool": ("draft_extend", "target", lambda length: length),
    "draft-extend writes behind its rows": ("draft_extend", "draft", lambda length: length + 4),
}


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(("phase", "buffer", "column_of"), KV_WRITES.values(), ids=KV_WRITES)
def test_wrong_kv_is_named(check_spoiled, phase, buffer, column_of, name):
    first = check_spoiled(CELL, phase, touch(buffer, name, column_of)).first_divergence
    assert (first.phase, first.field, first.request) == (phase, f"{buffer} {name}", 1)


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize(("phase", "buffer", "column_of"), STRAY.values(), ids=STRAY)
def test_a_stray_write_is_named_with_its_owner(check_spoiled, phase, buffer, column_of, name):
    """Sets the slot, since adding to unwritten KV, which is NaN, would change no bit."""

    def spoil(output, batch, pools):
        slot = slot_of(batch, pools, column_of(int(batch.seq_lens[1])))
        getattr(getattr(pools, buffer), name)[0, slot, 0, 0] = 7.0

    first = check_spoiled(CELL, phase, spoil).first_divergence
    assert (first.phase, first.field) == (phase, f"stray write, {buffer} pool")
    assert f"(request row 1, column {column_of(8)}, token " in first.fast


def record_elsewhere(output, batch, pools):
    pools.token_ids[batch.req_pool_indices[0], int(batch.seq_lens[0]) + 7] = 3


def swap_slots(output, batch, pools):
    row = batch.req_pool_indices[2]
    pools.req_to_token[row, [0, 1]] = pools.req_to_token[row, [1, 0]]


def lose_a_page(output, batch, pools):
    pools._allocator.allocate(1)


def give_a_page_twice(output, batch, pools):
    pools._allocator._free.append(pools._allocator.free_pages()[0])


@pytest.mark.parametrize("phase", ["prefill", "draft", "verify", "draft_extend"])
@pytest.mark.parametrize(
    ("field", "spoil"),
    [
        ("token_ids", record_elsewhere),
        ("req_to_token", swap_slots),
        ("page books", lose_a_page),
        ("page books", give_a_page_twice),
    ],
)
def test_wrong_tables_and_books_are_named(check_spoiled, phase, field, spoil):
    first = check_spoiled(CELL, phase, spoil).first_divergence
    assert (first.phase, first.field) == (phase, field)


@pytest.mark.parametrize("field", ["its input state", "an earlier output state"])
def test_a_write_to_a_state_is_caught(check_changed, field):
    left = []

    def draft(own, batch, state, pools):
        output = own(batch, state, pools)
        if field == "its input state":
            state.topk_scores[0, 0] = 0.5
        return output

    def verify(own, batch, state, pools):
        left.append(own(batch, state, pools))
        return left[-1]

    def draft_extend(own, batch, state, pools):
        left[0].target_logits.zero_()
        return own(batch, state, pools)

    found = check_changed(CELL, draft=draft, verify=verify, draft_extend=draft_extend).first_divergence
    assert found.field == field
