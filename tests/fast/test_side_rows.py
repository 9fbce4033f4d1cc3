"""Side outputs by slot: the kernels write and move what the reference does."""

from types import SimpleNamespace

import pytest
import torch

from specsim.core.kv_buffer import SideOutputs
from specsim.fast.kv import move_side, write_side

NUM_SLOTS = 30


@pytest.fixture
def side(device):
    """Hold rows of one number and of 2 x 3 numbers, all different."""
    outputs = SideOutputs({"one": (1,), "experts": (2, 3)}, NUM_SLOTS, device)
    for rows in outputs.rows.values():
        rows.copy_(torch.arange(rows.numel()).view(rows.shape))
    return outputs


def copied(side: SideOutputs) -> SideOutputs:
    copy = SideOutputs({name: tuple(rows.shape[1:]) for name, rows in side.rows.items()}, NUM_SLOTS)
    copy.copy_(side)
    return copy


def test_rows_are_written_to_their_slots(side, device):
    expected = copied(side)
    slots = torch.tensor([4, -1, 29, 0])
    rows = {name: torch.randint(100, (4, *each.shape[1:]), dtype=torch.int16) for name, each in side.rows.items()}
    there = {name: each.to(device) for name, each in rows.items()}
    write_side(SimpleNamespace(side=side), slots.to(device), SimpleNamespace(side=there))
    expected.write(slots, rows)
    for name, each in expected.rows.items():
        assert torch.equal(side.rows[name].cpu(), each)


def test_an_accepted_path_moves_to_the_columns_after_the_prefix(side, make_batch, pools, device):
    """The path of the first request lies in slots that it also fills; the second accepts its root only."""
    expected = copied(side)
    locations = torch.tensor([12, 14, 13, 15, 22, 24, 23, 25], device=device)  # of 4 nodes of each request
    accept_index = torch.tensor([[0, 2, 1], [4, -1, -1]], device=device)
    there = SimpleNamespace(req_to_token=pools.req_to_token, side=side)
    move_side(make_batch([0, 1], [2, 3]), locations, SimpleNamespace(accept_index=accept_index), there)
    expected.move(torch.tensor([12, 13, 14, 22]), torch.tensor([12, 13, 14, 23]))
    for name, each in expected.rows.items():
        assert torch.equal(side.rows[name].cpu(), each)


def test_a_path_in_reverse_is_read_before_it_is_written(side, make_batch, pools, device):
    expected = copied(side)
    locations = torch.tensor([12, 14, 13, 15], device=device)
    accept_index = torch.tensor([[0, 1, 2]], device=device)  # columns 2, 3, 4 get slots 12, 14, 13
    there = SimpleNamespace(req_to_token=pools.req_to_token, side=side)
    move_side(make_batch([0], [2]), locations, SimpleNamespace(accept_index=accept_index), there)
    expected.move(torch.tensor([12, 14, 13]), torch.tensor([12, 13, 14]))
    assert torch.equal(side.rows["experts"].cpu(), expected.rows["experts"])
    assert not torch.equal(side.rows["one"][13], side.rows["one"][14])
