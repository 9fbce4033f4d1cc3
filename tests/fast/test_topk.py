"""The k best of a row with their scores, fast against reference."""

import pytest
import torch

from specsim.fast.vocabulary import summaries
from specsim.fast.vocabulary import topk as fast
from specsim.reference.drafting import draft_topk
from specsim.reference.sampling import topk as best_first

EPS = 2.0**-23


@pytest.fixture
def gpu_blocks(monkeypatch) -> None:
    """Use at least as many programs as on a GPU.

    The interpreter would otherwise take all rows in one.
    """
    monkeypatch.setattr(fast, "block_of", lambda count, on_gpu, others=1: 1)
    monkeypatch.setattr(summaries, "block_of", lambda count, on_gpu, others=1: on_gpu)


def rows_of_logits(num_rows: int, vocab_size: int, kind: str) -> torch.Tensor:
    logits = 4 * torch.randn(num_rows, vocab_size)
    if kind == "tied":
        logits = logits.round()
    elif kind == "equal":
        logits = torch.zeros(num_rows, vocab_size)
        logits[:, 1::2] = -0.0
    elif kind == "impossible":
        logits[:, 1::2] = -torch.inf
    return logits


def check_topk(logits, k, d2t, slots, device, score="prob") -> None:
    """Compare ids exactly, and scores within the roundings of an exponent and of a sum of this many terms."""

    def on_device(value):
        return None if value is None else value.to(device)

    scores, target_ids = fast.draft_topk(logits.to(device), k, on_device(d2t), on_device(slots), score)
    exact, exact_ids = draft_topk(logits, k, d2t, slots, score)
    assert (scores.dtype, target_ids.dtype) == (torch.float32, torch.int64)
    assert torch.equal(target_ids.cpu(), exact_ids)
    spread = (logits.double().amax(-1, keepdim=True) - best_first(logits.double(), k)[0]).nan_to_num(posinf=0.0)
    scores, exact = scores.cpu().double(), exact.double()
    budget = EPS * (16 + 2 * spread) * (exact if score == "prob" else 1)
    assert ((scores == exact) | ((scores - exact).abs() <= budget)).all()


@pytest.mark.parametrize("kind", ["random", "tied", "equal", "impossible"])
@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "k"), [(1, 1, 1), (3, 5, 5), (7, 160, 10), (2, 4095, 16), (2, 4097, 64), (3, 9001, 3)]
)
@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_draft_topk_is_the_references(
    num_rows, vocab_size, k, kind, score, dtype, device, gpu_blocks, program_order
):
    """Logits in bf16 are selected by short keys, with equal logits in many groups."""
    check_topk(rows_of_logits(num_rows, vocab_size, kind).to(dtype), k, None, None, device, score)


def test_log_scores_of_peaked_rows_do_not_underflow(device, gpu_blocks, program_order):
    """Logits are spread over 300: log probabilities are finite and distinct where float32 has few probabilities."""
    logits = -torch.linspace(0, 300, 600).expand(2, -1)[:, torch.randperm(600)].contiguous()
    scores, _ = fast.draft_topk(logits.to(device), 64, None, None, "logprob")
    check_topk(logits, 64, None, None, device, "logprob")
    assert scores.isfinite().all()
    assert (scores.diff(dim=1) < 0).all()


@pytest.mark.parametrize("k", [3, 4])
@pytest.mark.parametrize("vocab_size", [7, 4099])
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_fast_draft_topk_maps_ids_once_and_drops_rows(vocab_size, k, score, device, gpu_blocks, program_order):
    d2t = torch.randint(0, 1000, (vocab_size,)).cumsum(0)
    logits = rows_of_logits(5, vocab_size, "random")
    logits[1] = torch.nan  # of a padded request
    check_topk(logits, k, d2t, torch.tensor([3, -1, 0, 5, -1]), device, score)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fast_draft_topk_reads_half_precision_exactly(dtype, device):
    check_topk(rows_of_logits(4, 300, "random").to(dtype), 6, None, None, device)


def test_fast_draft_topk_of_a_row_is_the_same_in_any_batch(device):
    logits = rows_of_logits(9, 5000, "random").to(device)
    together = fast.draft_topk(logits, 5, None)
    for row in (0, 4, 8):
        alone = fast.draft_topk(logits[row : row + 1], 5, None)
        assert all(torch.equal(one[0], all_of_them[row]) for one, all_of_them in zip(alone, together, strict=True))


def test_fast_draft_topk_refuses_bad_arguments(device):
    with pytest.raises(ValueError, match="topk is 6, more than the 5 ids"):
        fast.draft_topk(torch.zeros(2, 5, device=device), 6, None)
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        fast.draft_topk(torch.zeros(5, 2, device=device).T, 1, None)
