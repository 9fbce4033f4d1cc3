"""Sampled drafts in kernels: the distribution of every row by target id, and draws from it by name."""

import math

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch
from specsim.core.uniforms import draft_uniforms, token_noise
from specsim.fast.vocabulary import draft_distribution as fast
from specsim.fast.vocabulary.draft_distribution import Vocabulary, inverse_of, write_draft_prob
from specsim.reference.drafting import draft_distribution, draft_topk, sampled

PARAMS = [
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.4, seed=2**63 + 1),
    SamplingParams(),
    SamplingParams(temperature=1.5),
]
# Draft and target vocabulary: of one token group, of several, and the same for both.
VOCABULARIES = [(5, 9), (300, 400), (270, 270)]
D2T = torch.tensor([1, 1, 3, 3])  # target ids 1, 2, 5, 6


def rows(vocabulary: tuple[int, int], num_lanes: int):
    """Make four requests' logits, their batch, and d2t with its inverse (None where the vocabularies are the same)."""
    draft_size, target_size = vocabulary
    logits_RV = 3 * torch.randn(4 * num_lanes, draft_size)
    batch = Batch.of(range(4), range(4), [7, 12, 9, 30], PARAMS, target_size)
    if draft_size == target_size:
        return logits_RV, batch, None, None
    ids = torch.randperm(target_size)[:draft_size].sort().values
    t2d = torch.full((target_size,), -1).index_put((ids,), torch.arange(draft_size))
    return logits_RV, batch, ids - torch.arange(draft_size), t2d


@pytest.fixture
def small_programs(monkeypatch) -> None:
    """Use programs of 256 tokens, so that the larger vocabularies take several."""
    monkeypatch.setattr(fast, "block_of", lambda count, on_gpu: 256)


def on(device: str, *values):
    return tuple(value if value is None else value.to(device) for value in values)


def vocabulary_on(device: str, d2t: torch.Tensor | None, t2d: torch.Tensor | None) -> fast.Vocabulary:
    return fast.Vocabulary(*on(device, d2t, t2d))


def config_of(is_gumbel: bool, topk: int, score: str) -> SpecConfig:
    """Make a setting of three steps whose drafts are drawn with noise, or each with its uniform."""
    return SpecConfig(topk, 3, 1 + 3 * topk, verifier="gumbel" if is_gumbel else "multi_round", score=score)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(("is_gumbel", "count"), [(False, 1), (False, 3), (True, 1)])
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_first_drafts_are_the_references(vocabulary, is_gumbel, count, score, device, small_programs, program_order):
    """Lengths still lack the accepted tokens, as in draft-extend.

    A greedy request keeps its best.
    """
    logits_RV, batch, d2t, t2d = rows(vocabulary, 1)
    best, counts = draft_topk(logits_RV, count, d2t, score=score), torch.tensor([1, 2, 3, 4], dtype=torch.int32)
    expected_prob = draft_distribution(logits_RV, batch.sampling.temperature, d2t, None, vocabulary[1])
    root_lens = batch.seq_lens + counts
    noise = token_noise(batch.seeds, batch.request_ids, root_lens + 1, vocabulary[1]) if is_gumbel else None
    uniforms = draft_uniforms(batch.seeds, batch.request_ids, root_lens, 0, count)
    expected = sampled(best, expected_prob, None if is_gumbel else uniforms, noise, score)
    out = fast.DrawnDrafts(*(each.clone().to(device) for each in best))
    own_prob = torch.full((4, vocabulary[1]), torch.nan, device=device)
    root = fast.Root(*on(device, batch.seq_lens, counts))
    config = config_of(is_gumbel, count, score)
    fast.draw_drafts(
        batch.to(device), logits_RV.to(device), root, vocabulary_on(device, d2t, t2d), config, out, own_prob
    )
    assert torch.equal(out.topk_index.cpu(), expected[1])
    torch.testing.assert_close(out.topk_scores.cpu(), expected[0], rtol=1e-5, atol=1e-9 if score == "prob" else 1e-6)
    torch.testing.assert_close(own_prob.cpu(), expected_prob, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("vocabulary", VOCABULARIES[:2])
@pytest.mark.parametrize(("is_gumbel", "num_lanes"), [(False, 1), (False, 2), (True, 1)])
@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_drafts_of_a_step_are_the_references(
    vocabulary, is_gumbel, num_lanes, score, device, small_programs, program_order
):
    """In the second of three steps the distribution goes to that step's lanes.

    A lane without a slot has none.
    """
    logits_RV, batch, d2t, t2d = rows(vocabulary, num_lanes)
    slots = torch.arange(4 * num_lanes)
    slots[-1] = -1
    best = draft_topk(logits_RV, 1, d2t, slots, score)
    temperature = batch.sampling.temperature.repeat_interleave(num_lanes)
    expected_prob = draft_distribution(logits_RV, temperature, d2t, slots, vocabulary[1])
    noise = token_noise(batch.seeds, batch.request_ids, batch.seq_lens + 3, vocabulary[1]) if is_gumbel else None
    uniforms = draft_uniforms(batch.seeds, batch.request_ids, batch.seq_lens, 2, num_lanes)
    expected = sampled(best, expected_prob, None if is_gumbel else uniforms.view(-1, 1), noise, score)
    out = fast.DrawnDrafts(*(each.clone().to(device) for each in best))
    draft_prob = torch.full((4, 1 + 2 * num_lanes, vocabulary[1]), 9.0, device=device)
    loop = fast.Loop(*on(device, torch.tensor([1, 0], dtype=torch.int32), slots), 3)
    root = fast.Root(batch.seq_lens.to(device))
    config = config_of(is_gumbel, num_lanes, score)
    fast.draw_drafts(
        batch.to(device), logits_RV.to(device), root, vocabulary_on(device, d2t, t2d), config, out, draft_prob, loop
    )
    assert torch.equal(out.topk_index.cpu(), expected[1])
    torch.testing.assert_close(out.topk_scores.cpu(), expected[0], rtol=1e-5, atol=1e-9 if score == "prob" else 1e-6)
    written = draft_prob[:, 1 + num_lanes :].cpu()
    torch.testing.assert_close(written.flatten(0, 1), expected_prob, rtol=1e-5, atol=1e-9)
    assert (draft_prob[:, : 1 + num_lanes] == 9.0).all()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_distinct_first_drafts_are_the_references(vocabulary, device, program_order):
    """Two rows have fewer tokens than drafts: the last ones are drawn again, from all of them."""
    logits_RV, batch, d2t, t2d = rows(vocabulary, 1)
    logits_RV[1, 2:] = -torch.inf
    logits_RV[3, 1:] = -torch.inf
    config = SpecConfig(4, 3, 13, verifier="recursive")
    best = draft_topk(logits_RV, 4, d2t)
    expected_prob = draft_distribution(logits_RV, batch.sampling.temperature, d2t, None, vocabulary[1])
    uniforms = draft_uniforms(batch.seeds, batch.request_ids, batch.seq_lens, 0, 4)
    _, expected = sampled(best, expected_prob, uniforms, is_distinct=True)
    assert [len(set(row)) for row in expected.tolist()] == [4, 2, 4, 1]
    out = fast.DrawnDrafts(*(each.clone().to(device) for each in best))
    root = fast.Root(batch.seq_lens.to(device))
    own_prob = torch.full((4, vocabulary[1]), torch.nan, device=device)
    fast.draw_drafts(
        batch.to(device), logits_RV.to(device), root, vocabulary_on(device, d2t, t2d), config, out, own_prob
    )
    assert torch.equal(out.topk_index.cpu(), expected)


def test_a_step_beyond_the_last_writes_no_distribution(device):
    """During a capture, a captured step runs more often than a draft phase has steps."""
    logits_RV, batch, d2t, t2d = rows((5, 9), 1)
    out, draft_prob = (
        fast.DrawnDrafts(*on(device, *draft_topk(logits_RV, 1, d2t))),
        torch.full((4, 2, 9), 9.0, device=device),
    )
    loop = fast.Loop(*on(device, torch.tensor([1, 0], dtype=torch.int32), torch.arange(4)), 2)
    root = fast.Root(batch.seq_lens.to(device))
    config = config_of(False, 1, "prob")
    fast.draw_drafts(
        batch.to(device), logits_RV.to(device), root, vocabulary_on(device, d2t, t2d), config, out, draft_prob, loop
    )
    assert (draft_prob == 9.0).all()


def test_the_inverse_leads_back_to_draft_ids():
    assert inverse_of(D2T, 8).tolist() == [-1, 0, 1, -1, -1, 2, 3, -1]


@pytest.mark.parametrize("step", [None, 0, 1])
def test_a_distribution_is_written_by_target_id(step, device, program_order):
    """The second request draws nothing; the last of two steps has no further parents."""
    weights_RV = torch.tensor([[8.0, 4, 2, 2], [1, 1, 1, 1]])
    moments = torch.tensor([[3.0, 1.0, 2.0], [0.0, 1.0, 0.0]], device=device)
    expected_RV = torch.zeros(2, 8)
    expected_RV[0, [1, 2, 5, 6]] = weights_RV[0] / 16
    vocabulary = Vocabulary(D2T.to(device), inverse_of(D2T, 8).to(device))
    draft_prob = torch.full((2, 8) if step is None else (2, 2, 8), math.pi, device=device)
    at = None if step is None else torch.tensor(step, dtype=torch.int32, device=device)
    write_draft_prob(weights_RV.log2().to(device), moments, vocabulary, draft_prob, 1, at, 2)
    if step is None:
        assert torch.equal(draft_prob.cpu(), expected_RV)
    else:
        assert (draft_prob[:, 0] == draft_prob.new_tensor(math.pi)).all()
        written = torch.full((2, 8), math.pi) if step else expected_RV
        assert torch.equal(draft_prob[:, 1].cpu(), written)
