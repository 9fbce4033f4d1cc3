import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.fast.tree import nodes as fast
from specsim.reference.tree import select

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


GPU_BLOCKS = {fast: 4}


def rows_of_scores(num_rows: int, num_candidates: int, kind: str) -> torch.Tensor:
    scores = 4 * torch.randn(num_rows, num_candidates)
    if kind == "tied":
        scores = scores.round()
    elif kind == "equal":
        scores = torch.zeros(num_rows, num_candidates)
        scores[:, 1::2] = -0.0
    elif kind == "impossible":
        scores[:, 1::2] = -torch.inf
    return scores


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_select_takes_the_best_and_the_lower_index_of_equals(scores, data):
    count = data.draw(st.integers(0, len(scores)))
    best = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[:count]
    assert select(torch.tensor([scores, scores[::-1]]) / 4, count)[0].tolist() == sorted(best)


@given(st.integers(1, 4), st.integers(1, 40), st.sampled_from([1, 3, 100]), st.data())
@settings(max_examples=30)
def test_fast_select_is_the_references(num_rows, num_candidates, num_values, data):
    scores = torch.randint(-num_values, num_values + 1, (num_rows, num_candidates)) / num_values
    count = data.draw(st.integers(0, num_candidates))
    assert torch.equal(fast.select(scores.to(DEVICE), count).cpu(), select(scores, count))


@pytest.mark.parametrize(("num_candidates", "count"), [(710, 59), (1040, 63), (1024, 1024), (1025, 1), (4112, 100)])
@pytest.mark.parametrize("kind", ["random", "tied", "equal", "impossible"])
def test_fast_select_of_large_pools(num_candidates, count, kind, device, gpu_blocks, program_order):
    scores = rows_of_scores(2, num_candidates, kind)
    assert torch.equal(fast.select(scores.to(device), count).cpu(), select(scores, count))


@pytest.mark.parametrize("count", [0, 1, 5, 9])
def test_fast_select_orders_nan_too(count, device):
    """NaN ranks above every number, as in the reference's sort."""
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[nan] * 9, [0.0, -0.0, 1, -inf, nan, inf, -1, 2, -nan], [-inf] * 9, [1e-45, -1e-45, 0] * 3])
    assert torch.equal(fast.select(scores.to(device), count).cpu(), select(scores, count))


def test_fast_select_refuses_more_than_there_are(device):
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        fast.select(torch.zeros(1, 3, device=device), 4)
