"""Cuts of rows by bisection, equal from lists and rows, with lower bounds that lose no token."""

import math

import pytest
import torch
import triton
import triton.language as tl

from specsim.core.config import SamplingParams
from specsim.core.phases import Sampling
from specsim.fast.runtime.launch import kernel
from specsim.fast.vocabulary import filters as candidates
from specsim.fast.vocabulary import filters as fast
from specsim.fast.vocabulary.summaries import LOWEST_RANK, LogitRows, rank, scale_of, summarise, unrank, weights_of
from specsim.reference.sampling import target_prob

GROUP = 16
SETTINGS = [  # top_k, top_p, min_p
    (0, 0.9, 0.0), (0, 0.5, 0.0), (0, 0.999, 0.0), (0, 2.0**-20, 0.0), (40, 1.0, 0.0), (1, 1.0, 0.0),
    (100, 0.8, 0.0), (0, 1.0, 0.01), (0, 1.0, 1.0), (0, 0.7, 0.05), (30, 0.9, 0.02),
]  # fmt: skip


@kernel
def _cut(
    logits_ptr, adjusted_ptr, maxima_ptr, sums_ptr, top_k_ptr, top_p_ptr, min_p_ptr, lists_ptr, cuts_ptr, masses_ptr,
    temperature, num_rows, vocab_size, width, every, ROWS: tl.constexpr, FLOOR: tl.constexpr, LISTED: tl.constexpr,
    SHIFT: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Cut all rows in one program, each with its own filters, or only one of `every`.

    Without `FLOOR` there is no lower bound. Every other row, with the first and last, is read from the adjusted logits.
    """
    row, groups, count = (
        tl.minimum(tl.arange(0, ROWS), num_rows - 1),
        tl.arange(0, GROUPS)[None, :],
        tl.cdiv(vocab_size, GROUP),
    )
    mask = (row[:, None] >= 0) & (groups < count)
    maxima = tl.load(maxima_ptr + row[:, None] * count + groups, mask=mask, other=float("-inf"))
    sums = tl.load(sums_ptr + row[:, None] * count + groups, mask=mask, other=0.0)
    best, scale, shift = tl.max(maxima, axis=1), scale_of(temperature + 0.0 * row), row * 0 + SHIFT
    masses = sums * weights_of(maxima, best[:, None], scale[:, None])
    moments = fast.Moments(best, scale, tl.sum(masses, axis=1))
    filters = fast.Filters(tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row))
    floor = tl.full((ROWS,), -(2**31), tl.int32)
    if FLOOR:
        floor = candidates.floor_of(maxima, masses, moments, filters, shift, vocab_size, GROUP, 16)
    rows = LogitRows(logits_ptr, adjusted_ptr, 1 - row[:, None] % 2, row[:, None] * vocab_size, vocab_size)
    list_ptr, size = lists_ptr + row * width, row * 0 + vocab_size
    if LISTED:
        wanted = mask & (rank(maxima) >= floor[:, None])
        size = candidates.list_tokens(rows, wanted, floor, list_ptr, GROUP, 8, 8, 16)
    chosen, others = row % every == 0, fast.Cut(row * 0 - 1, row * 0 - 2, row * 0 - 3.0)
    source = fast.TokenSource(rows, list_ptr, tl.where(chosen, size, 0))
    cut = fast.cut_rows(chosen, source, moments, filters, floor, shift, others, LISTED, 128, 4)
    tl.store(cuts_ptr + row * 3, cut.last_rank)
    tl.store(cuts_ptr + row * 3 + 1, cut.last_token)
    tl.store(cuts_ptr + row * 3 + 2, size)
    tl.store(masses_ptr + row, cut.mass)


def cuts_of(logits_RV, device: str, temperature: float, use_floor: bool, listed: bool, every: int = 1):
    """Compute (last rank, last token, entries read) and masses of rows, with filters in the order of SETTINGS.

    every: one of this many rows is cut; the others keep the cut -1, -2 and the mass -3.
    """
    logits_RV = logits_RV.to(device)
    (num_rows, vocab_size), kinds = logits_RV.shape, list(zip(*SETTINGS, strict=True))
    top_k, top_p, min_p = (torch.tensor(kind, device=device) for kind in kinds)
    temperatures = torch.full((num_rows,), temperature, dtype=torch.float64, device=device)
    maxima, sums = summarise(logits_RV, temperatures, group=GROUP)
    groups = triton.next_power_of_2(maxima.shape[1])
    width = candidates.ENTRIES.value
    lists = torch.empty(num_rows, width, dtype=torch.int64, device=device)
    cuts, masses = torch.empty(num_rows, 3, dtype=torch.int32, device=device), torch.empty(num_rows, device=device)
    is_raw = (torch.arange(num_rows, device=device) % 2 == 1)[:, None]  # nothing may read the others
    raw_RV, adjusted_RV = logits_RV.masked_fill(~is_raw, torch.nan), logits_RV.float().masked_fill(is_raw, torch.nan)
    _cut[(1,)](
        raw_RV, adjusted_RV, maxima, sums, top_k, top_p, min_p, lists, cuts, masses, temperature, num_rows,
        vocab_size, width, every, ROWS=triton.next_power_of_2(num_rows), FLOOR=use_floor, LISTED=listed,
        SHIFT=16 if logits_RV.dtype == torch.bfloat16 else 0, GROUPS=groups, GROUP=GROUP,
    )  # fmt: skip
    return cuts.cpu(), masses.cpu()


def rows(kind: str, vocab_size: int) -> torch.Tensor:
    normal = torch.randn(len(SETTINGS), vocab_size)
    if kind == "peaked":
        return -1.7 * (1 + torch.rand(normal.shape).argsort(-1)).log() + 0.1 * normal
    if kind == "clustered":  # the likely tokens have the lowest ids
        return -1.2 * torch.arange(1, vocab_size + 1).log() + 0.1 * normal
    if kind == "tied":
        return (2 * normal).round()
    return {"flat": 0.3 * normal, "equal": 0 * normal}[kind]


def kept(logits_RV: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
    """Mark the tokens that cuts keep, bool [R, V]."""
    bits_RV = torch.where(logits_RV == 0, 0.0, logits_RV.float()).view(torch.int32)
    ranks_RV, tokens = bits_RV ^ ((bits_RV >> 31) & 0x7FFFFFFF), torch.arange(logits_RV.shape[1])
    return (ranks_RV > cuts[:, :1]) | ((ranks_RV == cuts[:, :1]) & (tokens <= cuts[:, 1:2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["peaked", "clustered", "tied", "flat", "equal"])
def test_cuts_through_lists_are_those_of_the_whole_row(kind, dtype, device):
    """The lower bounds hold for tokens in any order, and at most the tokens that reach them are listed."""
    logits_RV = rows(kind, 300).to(dtype)
    exact, exact_masses = cuts_of(logits_RV, device, 1.0, False, False)
    for use_floor, listed in ((True, False), (True, True), (False, True)):
        cuts, masses = cuts_of(logits_RV, device, 1.0, use_floor, listed)
        assert torch.equal(kept(logits_RV, cuts), kept(logits_RV, exact))
        torch.testing.assert_close(masses, exact_masses, rtol=2.0**-20, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["peaked", "clustered", "flat"])
def test_cuts_keep_the_references_tokens(kind, dtype, device):
    """Logits are nearly all negative, or of both signs.

    No cut is within rounding error.
    """
    logits_RV = rows(kind, 257).to(dtype)
    every = [SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p) for top_k, top_p, min_p in SETTINGS]
    sampling = Sampling.of(every, 257)
    prob_RV = torch.stack([target_prob(logits_V.double(), sampling, row) for row, logits_V in enumerate(logits_RV)])
    cuts, _ = cuts_of(logits_RV, device, 1.0, False, False)
    assert torch.equal(kept(logits_RV, cuts), prob_RV > 0)


@pytest.mark.parametrize("listed", [False, True])
def test_rows_that_are_not_chosen_keep_the_cut_they_have(listed, device):
    logits_RV = rows("peaked", 300)
    all_cuts, all_masses = cuts_of(logits_RV, device, 1.0, True, listed)
    cuts, masses = cuts_of(logits_RV, device, 1.0, True, listed, every=3)
    chosen = torch.arange(len(SETTINGS)) % 3 == 0
    assert torch.equal(cuts[chosen], all_cuts[chosen])
    assert torch.equal(masses[chosen], all_masses[chosen])
    assert cuts[~chosen, :2].unique(dim=0).tolist() == [[-1, -2]]
    assert masses[~chosen].unique().tolist() == [-3]


@kernel
def _cut_again(logits_ptr, values_ptr, tokens_ptr, last_token, target, vocab_size, BLOCK: tl.constexpr):
    """Cut one row, best token first, again at the mass `target`, after a cut that ends at `last_token`."""
    row = tl.arange(0, 1)
    cut = fast.Cut(rank(tl.load(logits_ptr + last_token + row)), row + last_token, row + 0.0)
    floor = tl.full((1,), LOWEST_RANK, tl.int32)
    rows = LogitRows(logits_ptr, logits_ptr, row[:, None], row[:, None], vocab_size)
    best = tl.load(logits_ptr + row)
    source = fast.TokenSource(rows, None, row + vocab_size)
    bound, token = fast._keep_before(source, best, row + 1.0, cut, floor, row, row + target, False, False, BLOCK, 4)
    tl.store(values_ptr + row, unrank(bound))
    tl.store(tokens_ptr + row, token)


@pytest.mark.parametrize(
    ("mass", "last"),
    [(1.0, (3.0, 0)), (1.25, (2.0, 1)), (1.75, (1.0, 2)), (1.875, (1.0, 3)), (2.25, (1.0, 3)), (3.0, (1.0, 3))],
)
def test_a_second_cut_keeps_no_more_than_the_first(mass, last, device):
    """The weights are 1, 1/2, three 1/4, and 1/8 without the last two.

    A target above their mass is rounding error.
    """
    logits, value = torch.tensor([3.0, 2.0, 1.0, 1.0, 1.0, 0.0], device=device), torch.empty(1, device=device)
    token = torch.empty(1, dtype=torch.int32, device=device)
    _cut_again[(1,)](logits, value, token, 3, mass, 6, BLOCK=8)
    assert (value.item(), token.item()) == last


@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_few_tokens_of_peaked_rows_are_listed(temperature, device):
    """The list has ten times the kept tokens for top-p .9, ties for top-k 1, rounding error for min-p 1."""
    logits_RV = rows("peaked", 1000)
    cuts, _ = cuts_of(logits_RV, device, temperature, True, True)
    kept = logits_RV[0].double().div(temperature).softmax(-1).sort(descending=True).values.cumsum(-1) < 0.9
    assert int(cuts[0, 2]) <= 10 * (int(kept.sum()) + 1)
    assert int(cuts[5, 2]) <= 2 * GROUP
    assert math.isclose(int(cuts[8, 2]), 1, abs_tol=2)
