"""Static buffers: their guards, copies of blocks, and copies of states."""

import pytest
import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, DraftExtendInput
from specsim.fast.frame import RoundShape, padded_extend_input
from specsim.fast.runtime.buffers import Buffers, GuardError, load_extend_input, unload_extend_input

CONFIG = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, page_size=4, max_len=64)
FEATURES = 12
WIDTH = CONFIG.num_steps + 1


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


def make_static() -> DraftExtendInput:
    shape = RoundShape(4, CONFIG, vocab_size=7, num_features=FEATURES, dtype=torch.float32)
    return Buffers(torch.device("cpu")).like("extend_input", padded_extend_input(shape))


def assert_equal(first: DraftExtendInput, second: DraftExtendInput) -> None:
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name
        assert tensor.dtype == second.tensors[name].dtype, name


def make_extend_input(counts: list[int], extend: str) -> DraftExtendInput:
    """Make rows named by request and index.

    counts: accepted tokens of each request.
    """
    rows = [WIDTH if extend == "fixed" else count for count in counts]
    names = torch.tensor([100 * b + j for b, count in enumerate(rows) for j in range(count)], dtype=torch.int64)
    tokens = torch.tensor(counts, dtype=torch.int32)
    return DraftExtendInput(
        row_starts=torch.tensor([0, *rows]).cumsum(0), hidden=names[:, None].expand(-1, FEATURES).float().clone(),
        input_ids=names, positions=names + 1, cache_locations=names + 2, num_accepted_drafts=tokens - 1,
        num_accepted_tokens=tokens, bonus_tokens=tokens + 7, seq_lens=tokens.long() + 20,
        req_pool_indices=torch.arange(len(counts)),
    )  # fmt: skip


@pytest.mark.parametrize("extend", ["fixed", "ragged"])
@pytest.mark.parametrize("counts", [[], [1], [4], [2, 4, 1], [1, 3, 4, 2]])
def test_rows_of_draft_extend_keep_their_requests(counts, extend):
    static = make_static()
    load_extend_input(static, make_extend_input([4, 4, 4, 4], extend), WIDTH)
    state = make_extend_input(counts, extend)
    load_extend_input(static, state, WIDTH)
    assert_equal(unload_extend_input(static, len(counts), WIDTH, extend), state)
    assert static.row_starts.tolist() == [0, 4, 8, 12, 16]
    live = torch.zeros(4, WIDTH, dtype=torch.bool)
    for request, count in enumerate(counts):
        live[request, : WIDTH if extend == "fixed" else count] = True
    assert ((static.cache_locations >= 0) == live.flatten()).all()
    assert (static.num_accepted_tokens[len(counts) :] == 1).all()


@pytest.mark.parametrize("extend", ["fixed", "ragged"])
def test_rows_of_no_request_are_padding(extend):
    static = make_static()
    for count in (4, 0):
        load_extend_input(static, make_extend_input([4] * count, extend), WIDTH)
    assert_equal(static, make_static())
