"""Copies of draft-extend's rows to static buffers and back."""

import pytest
import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import DraftExtendInput
from specsim.fast.runtime.buffers import Buffers
from specsim.fast.runtime.padding import RoundShape, padded_extend_input
from specsim.fast.runtime.states import load_extend_input, unload_extend_input

CONFIG = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, page_size=4, max_len=64)
FEATURES = 12
WIDTH = CONFIG.num_steps + 1


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
