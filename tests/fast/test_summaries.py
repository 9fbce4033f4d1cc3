"""Summaries of token groups: the largest logit and the sum of weights, from which distributions are made."""

import math

import pytest
import torch
import triton
import triton.language as tl

from specsim.fast.runtime.launch import kernel
from specsim.fast.vocabulary import summaries as fast
from specsim.fast.vocabulary.summaries import LogitRows, logits_at

BINARY = math.log2(math.e)  # this temperature makes the weights of integer logits powers of two: nothing is rounded


def grouped(logits_RV: torch.Tensor, group: int) -> torch.Tensor:
    """Group the tokens, f64 [R, G, group], with -inf beyond the vocabulary."""
    missing = -logits_RV.shape[1] % group
    return torch.nn.functional.pad(logits_RV.double(), (0, missing), value=-torch.inf).unflatten(1, (-1, group))


def launch_as_on_gpu(monkeypatch, rows: str) -> None:
    """Choose the programs as for "few" or "many" rows on a GPU."""
    monkeypatch.setattr(fast, "block_of", lambda count, on_gpu, others=1: on_gpu)
    monkeypatch.setattr(fast, "INTERPRETED", False)
    monkeypatch.setattr(fast, "MANY_BLOCKS", 0 if rows == "many" else 2**31)


@pytest.mark.parametrize("on_gpu", [None, "few", "many"])
@pytest.mark.parametrize("num_requests", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 255, 256, 257, 4096, 4099, 8208, 9216, 16385])
def test_summaries_of_powers_of_two_are_exact(
    vocab_size, dtype, num_requests, on_gpu, device, program_order, monkeypatch
):
    """Sums are exact.

    on_gpu: in several programs, the last of them with groups beyond the row.
    """
    if on_gpu:
        launch_as_on_gpu(monkeypatch, on_gpu)
    logits_RV = torch.randint(-8, 8, (5, vocab_size)).to(dtype)
    logits_RV[:, ::3], logits_RV[2] = -torch.inf, -torch.inf
    temperature_B = torch.full((num_requests,), BINARY, dtype=torch.float64, device=device)
    maxima, sums = fast.summarise(logits_RV.to(device), temperature_B, torch.zeros_like(temperature_B))
    exact = grouped(logits_RV, fast.GROUP)
    assert torch.equal(maxima.cpu().double(), exact.amax(-1))
    expected = (exact - exact.amax(-1, keepdim=True)).exp2().nan_to_num(0.0).sum(-1)
    assert torch.equal(sums.cpu().double(), expected)


@pytest.mark.parametrize("group", [16, 64])
def test_groups_have_the_given_size(group, device):
    """The default temperature is 1."""
    logits_RV = torch.randn(3, 1000)
    maxima, sums = fast.summarise(logits_RV.to(device), group=group)
    exact = grouped(logits_RV, group)
    assert torch.equal(maxima.cpu().double(), exact.amax(-1))
    total = torch.logsumexp(exact, -1) - exact.amax(-1)
    torch.testing.assert_close(sums.cpu().double().log(), total, rtol=0, atol=2.0**-20)


@pytest.mark.parametrize("on_gpu", [None, "few", "many"])
@pytest.mark.parametrize("per_request", [1, 2])
def test_rows_are_read_by_request_and_padded_ones_are_not(per_request, on_gpu, device, program_order, monkeypatch):
    """Rows of four requests are raw, adjusted, padded and adjusted.

    NaN is where nothing may read.
    """
    if on_gpu:
        launch_as_on_gpu(monkeypatch, on_gpu)
    size = 9300 if on_gpu == "many" else 300
    changed_B = torch.tensor([0, 1, -1, 1], dtype=torch.int32)
    temperature_B = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
    changed_R, temperature_R = (each.repeat_interleave(per_request) for each in (changed_B, temperature_B))
    logits_RV, adjusted_RV = torch.randn(len(changed_R), size).bfloat16(), torch.randn(len(changed_R), size)
    read_RV = torch.where((changed_R == 1)[:, None], adjusted_RV, logits_RV.float())
    logits_RV[changed_R != 0], adjusted_RV[changed_R != 1] = torch.nan, torch.nan
    tables = (each.to(device) for each in (logits_RV, temperature_B, changed_B, adjusted_RV))
    maxima, sums = (each.cpu() for each in fast.summarise(*tables))
    assert (maxima[changed_R < 0] == -math.inf).all()
    assert (sums[changed_R < 0] == 0).all()
    for row in (changed_R >= 0).nonzero().flatten().tolist():
        exact = grouped(read_RV[row : row + 1], fast.GROUP)[0]
        assert torch.equal(maxima[row].double(), exact.amax(-1))
        exact = (exact - exact.amax(-1, keepdim=True)) / (float(temperature_R[row]) or 1.0)
        torch.testing.assert_close(sums[row].double(), exact.exp().sum(-1), rtol=2.0**-18, atol=0)


def test_summaries_of_a_row_are_the_same_in_any_batch(device):
    """Each row has its own temperature, and no requests are marked."""
    logits_RV, temperature_R = torch.randn(9, 5000).to(device), torch.linspace(0, 2, 9).double().to(device)
    together = fast.summarise(logits_RV, temperature_R)
    for row in (0, 4, 8):
        alone = fast.summarise(logits_RV[row : row + 1], temperature_R[row : row + 1])
        assert all(torch.equal(one[0], all_of_them[row]) for one, all_of_them in zip(alone, together, strict=True))


@kernel
def _rank(values_ptr, ranks_ptr, back_ptr, size, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    ranks = fast.rank(tl.load(values_ptr + offs, mask=offs < size, other=0.0))
    tl.store(ranks_ptr + offs, ranks, mask=offs < size)
    tl.store(back_ptr + offs, fast.unrank(ranks), mask=offs < size)


def test_ranks_are_in_the_order_of_numbers_and_lead_back_to_them(device):
    values = [-math.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.5, 3e38, math.inf]
    values = torch.tensor(values, device=device)
    ranks, back = torch.empty(10, dtype=torch.int32, device=device), torch.empty(10, device=device)
    _rank[(1,)](values, ranks, back, 10, BLOCK=triton.next_power_of_2(10))
    assert ranks[4] == ranks[5]
    assert (ranks.diff() > 0).tolist() == [True] * 4 + [False] + [True] * 4
    assert torch.equal(back, values)
    assert int(ranks[0]) > fast.LOWEST_RANK.value


@kernel
def _read(raw_ptr, adjusted_ptr, is_adjusted_ptr, out_ptr, vocab_size, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    row, tokens = tl.arange(0, ROWS)[:, None], tl.arange(0, TOKENS)[None, :] - 1
    rows = LogitRows(raw_ptr, adjusted_ptr, tl.load(is_adjusted_ptr + row), row * vocab_size, vocab_size)
    mask = (row >= 0) & (tokens != 2)
    tl.store(out_ptr + row * TOKENS + tokens + 1, logits_at(rows, tokens, mask))


def test_logits_are_raw_or_adjusted_and_none_where_masked(device):
    """Tokens are -1 to 6 of a vocabulary of 5, without 2.

    NaN is where nothing may read.
    """
    raw_RV, adjusted_RV = torch.randn(2, 5).bfloat16(), torch.randn(2, 5)
    expected_RV = torch.stack([raw_RV[0].float(), adjusted_RV[1]])
    raw_RV[1], adjusted_RV[0] = torch.nan, torch.nan
    out = torch.empty(2, 8, device=device)
    is_adjusted = torch.tensor([0, 1], dtype=torch.int32, device=device)
    _read[(1,)](raw_RV.to(device), adjusted_RV.to(device), is_adjusted, out, 5, ROWS=2, TOKENS=8)
    expected = torch.full((2, 8), -torch.inf)
    expected[:, 1:6] = expected_RV
    expected[:, 3] = -torch.inf
    assert torch.equal(out.cpu(), expected)
