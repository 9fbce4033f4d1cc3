"""Draws by the inverse CDF of a distribution and of its residual, token group by token group."""

import math
from typing import no_type_check

import pytest
import torch
import triton.language as tl

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch
from specsim.fast.runtime.launch import kernel
from specsim.fast.sampling import distributions
from specsim.fast.vocabulary import distribution as fast
from specsim.fast.vocabulary import summaries
from specsim.fast.vocabulary.distribution import Distributions
from specsim.fast.vocabulary.penalties import Logits
from specsim.reference.sampling import inverse_cdf, target_prob

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOWEST, HIGHEST = 2.0**-24, 1 - 2.0**-24  # the bounds of specsim.core.uniforms.named_uniforms
BINARY = dict(temperature=math.log2(math.e))  # makes the weights of integer logits powers of two: nothing is rounded


@kernel
@no_type_check
def _draw(
    distributions,
    workspace,
    tokens_ptr,
    next_ptr,
    uniforms_ptr,
    out_ptr,
    first,
    count,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
):
    draw = tl.program_id(0)
    siblings = None
    if tokens_ptr is not None:
        siblings = fast.Siblings(tokens_ptr, next_ptr, tl.full((), 0, tl.int64) + first, count)
    uniform = tl.load(uniforms_ptr + draw)
    token = fast.draw(distributions, 0, siblings, uniform, workspace, draw, GROUP, GROUPS, PER)
    tl.store(out_ptr + draw, token)


def distribution_of(logits, device: str, **params) -> Distributions:
    """Make the distribution of one row."""
    logits_1V = torch.as_tensor(logits).float()[None].to(device)
    changed = torch.zeros(1, dtype=torch.int32, device=device)
    batch = Batch.of([0], [0], [3], [SamplingParams(**params)], logits_1V.shape[1]).to(device)
    return distributions(batch, Logits(logits_1V, changed, torch.full_like(logits_1V, torch.nan)))


def fast_draws(logits, uniforms: list[float], device: str = DEVICE, rejected=(), **params) -> list[int]:
    """Draw with rejected tokens at nodes 1, 2, …, whose list ends with a link beyond the tree."""
    distribution, count = distribution_of(logits, device, **params), len(rejected) + 1
    tokens, siblings = (
        (torch.tensor(column, device=device) for column in ([9, *rejected], [-1, *range(2, count + 1)]))
        if rejected
        else (None, None)
    )
    uniforms = torch.tensor(uniforms, device=device)
    out = torch.empty(len(uniforms), dtype=torch.int32, device=device)
    blocks = dict(GROUP=summaries.GROUP, GROUPS=fast.groups_block(distribution.logits.raw.shape[1]), PER=fast.PER)
    space = fast.Workspace.of(distribution, len(uniforms))
    _draw[(len(uniforms),)](distribution.tables, space, tokens, siblings, uniforms, out, 1, count, **blocks)
    return out.tolist()


@pytest.fixture(params=[4, 256])
def group(request, monkeypatch) -> int:
    """List the tokens of a group."""
    import specsim.fast.sampling

    for module in (summaries, specsim.fast.sampling):
        monkeypatch.setattr(module, "GROUP", request.param)
    return request.param


@pytest.mark.parametrize("logits", [[0], [3, 1, -1, 2, -6, 0], [-4, 0, -4, 0, 0, -2, -1, -4, -4]])
def test_fast_draws_spend_the_uniforms_in_proportion(logits, group, device):
    """Uniforms are the midpoints of as many equal cells as there is mass, without weights below 2⁻³ of the largest."""
    weights = [2 ** (logit - max(logits) + 3) if logit >= max(logits) - 3 else 0 for logit in logits]
    cells = [(cell + 0.5) / sum(weights) for cell in range(sum(weights))]
    drawn = fast_draws(torch.tensor(logits).float(), cells, device, **BINARY, min_p=0.125)
    assert [drawn.count(token) for token in range(len(weights))] == weights
    assert drawn == sorted(drawn)


def test_fast_draws_on_edges_and_at_both_ends(group, device, program_order):
    logits = torch.tensor([-torch.inf, 0, 0, -torch.inf, 1, -torch.inf])
    uniforms = [LOWEST, 0.25, 0.5, 0.75, HIGHEST]
    assert fast_draws(logits, uniforms, device, **BINARY) == [1, 2, 4, 4, 4]


@pytest.mark.parametrize("vocab_size", [200, 256, 700])
def test_the_highest_uniform_draws_the_last_possible_token(vocab_size, device):
    """A group's mass may be rounded above the sum of its tokens' weights added one by one."""
    logits_RV = torch.randn(8, vocab_size)
    logits_RV[:, -3:] = -torch.inf
    drawn = [fast_draws(logits_V, [HIGHEST], device, temperature=1.0)[0] for logits_V in logits_RV]
    assert drawn == [vocab_size - 4] * 8


def test_a_share_above_every_sum_draws_the_last_token(group, device):
    """1 is no uniform, but a GPU's parallel sums may be largest at a group without mass."""
    logits = torch.tensor([0, 1, -torch.inf, 0, 1, 0, -torch.inf, -torch.inf, -torch.inf])
    assert fast_draws(logits, [1.0], device, **BINARY) == [5]


@pytest.mark.parametrize("sign", [-1, 0, 1], ids=["falling", "equal", "rising"])
def test_fast_draws_from_a_large_vocabulary_stay_on_it(sign, device):
    logits_V = sign * torch.linspace(0, 80, 50_000)
    exact = torch.softmax(logits_V.double(), -1).cumsum(-1)
    uniforms = [LOWEST, 0.3, HIGHEST]
    for uniform, token in zip(uniforms, fast_draws(logits_V, uniforms, device, temperature=1.0), strict=True):
        before = float(exact[token - 1]) if token else 0.0
        assert before - 50_000 * 2.0**-24 <= uniform <= float(exact[token]) + 50_000 * 2.0**-24


@pytest.mark.parametrize(
    ("rejected", "uniforms", "drawn"),
    [
        ([4], [LOWEST, 0.49, 0.51, HIGHEST], [0, 0, 1, 1]),
        ([0, 1], [LOWEST, HIGHEST], [4, 4]),
        ([], [LOWEST, 0.26, 0.51, HIGHEST], [0, 1, 4, 4]),
        ([0, 1, 4], [LOWEST, 0.26, 0.51, HIGHEST], [0, 1, 4, 4]),  # no mass is left: the whole one
    ],
)
def test_fast_draws_exclude_rejected_tokens(rejected, uniforms, drawn, group, device):
    """The distribution is 1/4, 1/4, -, -, 1/2."""
    logits = [0, 0, -torch.inf, -torch.inf, 1]
    assert fast_draws(logits, uniforms, device, rejected, **BINARY) == drawn


@pytest.mark.parametrize("params", [{}, dict(top_k=30), dict(top_p=0.9), dict(min_p=0.05)], ids=str)
def test_fast_draws_from_many_groups_are_those_of_one_scan(params, device):
    """Weights are powers of two, so nothing is rounded.

    The whole vocabulary is scanned in float64.
    """
    logits_V, rejected = torch.randint(-6, 4, (3000,)).float(), [7, 256, 257, 2999, 1500]
    logits_V[rejected] = torch.tensor([4.0, 3.0, 2.0, 4.0, -5.0])
    uniforms = [LOWEST, *(torch.rand(12) * 2**20 // 1 / 2**20).tolist(), HIGHEST]
    sampling = Batch.of([0], [0], [3], [SamplingParams(**BINARY, **params)], 3000).sampling
    left_V = target_prob(logits_V.double(), sampling, 0)
    left_V[rejected] = 0
    expected = [inverse_cdf(left_V, uniform) for uniform in uniforms]
    assert fast_draws(logits_V, uniforms, device, rejected, **BINARY, **params) == expected


def test_a_draw_of_a_row_is_the_same_solo_and_batched(device):
    """The bits are equal, so a request's tokens do not depend on its batch."""
    logits_RV = 3 * torch.randn(5, 1000)
    batch = Batch.of(range(5), range(5), [3] * 5, [SamplingParams(temperature=1.0, top_p=0.9)] * 5, 1000)
    changed, unread = torch.zeros(5, dtype=torch.int32), torch.full_like(logits_RV, torch.nan)
    together = distributions(batch.to(device), Logits(logits_RV.to(device), changed.to(device), unread.to(device)))
    for row in range(5):
        alone = distribution_of(logits_RV[row], device, temperature=1.0, top_p=0.9)
        for name in ("maxima", "sums", "moments", "lasts"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), name
