"""Residual distributions after rejected drafts: masses by token group, and the token drawn from them."""

import pytest
import torch

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch
from specsim.core.uniforms import Stream, named_uniforms
from specsim.fast.sampling import distributions
from specsim.fast.vocabulary import residual as fast
from specsim.fast.vocabulary.distribution import Requests
from specsim.fast.vocabulary.penalties import Logits
from specsim.fast.vocabulary.summaries import GROUP
from specsim.reference.sampling import inverse_cdf, target_prob

V, NODES = 600, 3  # three groups of tokens
PARAMS = [SamplingParams(temperature=1.0, top_k=400, seed=5), SamplingParams(temperature=1.0, seed=8), SamplingParams()]


def scene(device: str, size: int = 3):
    """Make p of three requests' three nodes, one with filters, one padded, and q of two nodes of each.

    size: number of requests.
    """
    logits_RV = 2 * torch.randn(size * NODES, V)
    batch = Batch.of(range(size), [0, 1, -1][:size], [5, 6, 0][:size], PARAMS[:size], V)
    changed = torch.tensor([0, 0, -1][:size], dtype=torch.int32)
    logits = Logits(logits_RV.to(device), changed.to(device), torch.empty_like(logits_RV, device=device))
    made = distributions(batch.to(device), logits)
    prob_RV = [target_prob(logits_V.double(), batch.sampling, row // NODES) for row, logits_V in enumerate(logits_RV)]
    return batch, torch.stack(prob_RV).view(size, NODES, V), torch.randn(size, 2, V).softmax(-1), made


@pytest.mark.parametrize("size", [1, 3])
def test_masses_are_those_of_every_groups_residual(size, device, program_order):
    """Each request has two rows.

    Where q has scale 0 it is not read, as a leaf has none.
    """
    batch, prob_BNV, draft_prob, made = scene(device, size)
    nodes, scales = (
        torch.tensor([0, 1, 1, 2, 0, 0])[: 2 * size],
        torch.tensor([[1.0, 1], [0.5, 1], [1, 2.5], [1, 0], [1, 0], [1, 0]])[: 2 * size],
    )
    residuals = fast.Residuals(nodes.to(device), scales.to(device))
    found = fast.residual_masses(made, draft_prob.to(device), residuals, batch.seq_lens.to(device)).cpu()
    for row, (node, (a, c)) in enumerate(zip(nodes.tolist(), scales.tolist(), strict=True)):
        request = row // 2
        left = a * prob_BNV[request, node] - (c * draft_prob[request, node] if c else 0)
        groups = torch.nn.functional.pad(left.clamp(min=0), (0, -V % GROUP)).view(-1, GROUP).sum(-1)
        expected = groups if batch.seq_lens[request] > 0 else torch.zeros_like(groups)
        torch.testing.assert_close(found[row].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("uniform", [2.0**-24, 0.31, 0.77, 1 - 2.0**-24, None])
def test_the_bonus_is_drawn_from_the_residual_or_else_from_p(uniform, device):
    """The first request's q leaves no mass at its first node.

    Uniforms that are not given are drawn by name.
    """
    batch, prob_BNV, draft_prob, made = scene(device)
    nodes, scales = torch.tensor([0, 1, 0]), torch.tensor([[1.0, 1e9], [1.0, 1.0], [1.0, 0.0]])
    requests, residuals = Requests.of(batch.to(device)), fast.Residuals(nodes.to(device), scales.to(device))
    own = named_uniforms(batch.seeds, batch.request_ids, Stream.FINAL, batch.seq_lens, 0)
    given = own if uniform is None else torch.full((3,), uniform, dtype=torch.float64)
    uniforms = None if uniform is None else given.to(device)
    found = fast.draw_bonus(made, draft_prob.to(device), residuals, requests, uniforms).tolist()
    left = (prob_BNV[1, 1] - draft_prob[1, 1]).clamp(min=0)
    assert found[:2] == [inverse_cdf(prob_BNV[0, 0], float(given[0])), inverse_cdf(left, float(given[1]))]
