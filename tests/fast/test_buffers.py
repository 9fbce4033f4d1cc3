"""Static buffers: their guards, copies of blocks, and copies of states."""

import pytest
import torch

from specsim.core.phases import AutoregressiveInput
from specsim.fast.runtime.buffers import Buffers, GuardError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_write_next_to_a_buffer_is_found(dtype, place):
    buffers = Buffers(torch.device("cpu"))
    body = buffers.block({"tokens": torch.zeros(3, 2, dtype=dtype)}).tensors["tokens"]
    buffers.block({"others": torch.zeros(5)})
    body.fill_(1)
    buffers.check()
    outside = -1 if place == "before" else body.numel()
    whole = torch.empty(0, dtype=dtype).set_(body.untyped_storage())
    whole[body.storage_offset() + outside] = 1
    with pytest.raises(GuardError, check=lambda error: (error.side, error.name) == (place, "tokens")):
        buffers.check()


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("place", ["before", "behind"])
def test_a_write_between_the_tensors_of_a_block_is_found(name, place):
    values = {"a": torch.zeros(3, 2), "b": torch.zeros(5, 0), "c": torch.ones(7, dtype=torch.int64)}
    buffers = Buffers(torch.device("cpu"))
    block = buffers.block(values)
    for each in block.tensors.values():
        each.fill_(1)
    buffers.check()
    body = block.tensors[name]
    whole = torch.empty(0, dtype=body.dtype).set_(body.untyped_storage())
    whole[body.storage_offset() + (-1 if place == "before" else body.numel())] = 1
    with pytest.raises(GuardError, check=lambda error: (error.side, error.name) == (place, name)):
        buffers.check()


@pytest.mark.parametrize("size", [0, 1, 4])
def test_a_block_is_copied_whole_and_cut_to_its_requests(size):
    values = {
        "odd": torch.rand(4, 3).bfloat16(),
        "rows": torch.arange(8),  # two a request
        "none": torch.empty(4, 0),
        "last": torch.arange(12, dtype=torch.int32).view(4, 3),
    }
    block = Buffers(torch.device("cpu")).block(values)
    raw, taken = block.copy(size, 4)
    assert torch.equal(raw, block.raw)
    for value, copied, each in zip(values.values(), taken, block.tensors.values(), strict=True):
        assert torch.equal(copied, value[: size * len(value) // 4])
        each.fill_(99)
        assert torch.equal(copied, value[: size * len(value) // 4])


def test_buffers_like_a_state_copy_it_to_their_own_memory():
    state = AutoregressiveInput(
        torch.arange(3, dtype=torch.int32), torch.rand(3, 2), torch.ones(3, 2, dtype=torch.int64), torch.rand(3, 4)
    )
    static = Buffers(torch.device("cpu")).like("draft_input", state)
    assert static.draft_prob is None
    for name in ("topk_scores", "topk_index", "bonus_tokens"):
        before, copied = getattr(state, name), getattr(static, name)
        assert torch.equal(before, copied)
        assert before.dtype == copied.dtype
        assert before.data_ptr() != copied.data_ptr()
