"""Lists of the tokens on which cuts depend; their lower bounds are tested with the cuts, in test_filters.py."""

import pytest
import torch
import triton.language as tl

from specsim.fast.runtime.launch import kernel
from specsim.fast.vocabulary import filters as fast
from specsim.fast.vocabulary.summaries import LogitRows, rank

GROUP = 16


@kernel
def _list(
    logits_ptr, wanted_ptr, least_ptr, lists_ptr, found_ptr, vocab_size, width,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    groups = tl.arange(0, GROUPS)[None, :]
    wanted = tl.load(wanted_ptr + row[:, None] * GROUPS + groups) != 0
    rows = LogitRows(logits_ptr, logits_ptr, row[:, None] * 0, row[:, None] * vocab_size, vocab_size)
    lowest = rank(tl.load(least_ptr + row))
    found = fast.list_tokens(rows, wanted, lowest, lists_ptr + row * width, GROUP, 8, 4, 4)
    tl.store(found_ptr + row, found)


@pytest.mark.parametrize("vocab_size", [250, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wanted_tokens_above_the_bound_are_listed_in_order(vocab_size, dtype, device):
    """Each row has another bound: some, equal to a tie, none, all."""
    logits_RV = torch.randn(4, vocab_size).mul(2).round().to(dtype)
    wanted_RG = torch.randint(2, (4, 16), dtype=torch.int32)
    least_R = torch.tensor([1.5, 0.0, 100.0, -torch.inf])
    lists = torch.empty(4, fast.ENTRIES.value, dtype=torch.int64, device=device)
    found = torch.empty(4, dtype=torch.int32, device=device)
    tables = logits_RV.to(device), wanted_RG.to(device), least_R.to(device), lists, found
    _list[(1,)](*tables, vocab_size, lists.shape[1], ROWS=4, GROUPS=16, GROUP=GROUP)
    for row in range(4):
        allowed_V = wanted_RG[row].repeat_interleave(GROUP)[:vocab_size] > 0
        expected = (allowed_V & (logits_RV[row].float() >= least_R[row])).nonzero().flatten()
        entries = lists[row, : int(found[row])].cpu()
        assert (entries & 0xFFFFFFFF).tolist() == expected.tolist()
        bits = torch.where(logits_RV[row] == 0, 0.0, logits_RV[row].float()).view(torch.int32)[expected]
        assert (entries >> 32).tolist() == (bits ^ ((bits >> 31) & 0x7FFFFFFF)).tolist()


def test_too_long_a_list_is_counted_and_ends_within_its_room(device):
    """Parts of 8 tokens, or tokens, are more than there is room for."""
    vocab_size = 2 * 8 * fast.MOST_LISTED.value
    groups = 128
    logits_RV = torch.zeros(2, vocab_size)
    logits_RV[1] = -1.0
    logits_RV[1, ::16] = 0.0  # a token of every second part
    logits_RV[1, 0:64] = 0.0
    wanted_RG = torch.ones(2, groups, dtype=torch.int32)
    lists = torch.full((2, fast.ENTRIES.value + 8), -7, dtype=torch.int64, device=device)
    found = torch.empty(2, dtype=torch.int32, device=device)
    tables = logits_RV.to(device), wanted_RG.to(device), torch.zeros(2, device=device), lists, found
    _list[(1,)](*tables, vocab_size, lists.shape[1], ROWS=2, GROUPS=groups, GROUP=vocab_size // groups)
    assert (found > fast.MOST_LISTED.value).all()
    assert (lists[:, -8:] == -7).all()
