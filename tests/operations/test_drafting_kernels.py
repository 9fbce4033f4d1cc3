"""Drafting kernels equal the reference under any setting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.config import SpecConfig
from specsim.core.phases import AutoregressiveInput, Candidates, DraftInput
from specsim.fast.drafting import expansion as fast
from specsim.fast.drafting import lanes as fast_lanes
from specsim.fast.tree import select
from specsim.fast.vocabulary.topk import draft_topk
from specsim.reference.drafting import Lanes, expand, start_lanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


EPS = 2.0**-23


GPU_BLOCKS = {fast: 4, fast_lanes: 4}


def scripted(batch_size: int, config: SpecConfig, hidden_size: int, tied: bool):
    """Make a draft input and the outputs of each forward of a draft loop: (topk_scores, topk_index, hidden)."""
    k = config.topk

    def scores(*shape):
        prob = torch.randint(0, 5, shape) / 4 if tied else torch.rand(shape)
        return prob if config.score == "prob" else prob.log()

    count = 1 if config.is_sampled else k
    first = AutoregressiveInput(
        topk_scores=scores(batch_size, k),
        topk_index=torch.randint(0, 99, (batch_size, k)),
        hidden=torch.randn(batch_size, hidden_size),
        bonus_tokens=torch.randint(0, 9, (batch_size,), dtype=torch.int32),
        draft_prob=torch.rand(batch_size, 4) if config.has_draft_prob else None,
    )
    steps = [
        (
            scores(batch_size, k, count),
            torch.randint(0, 99, (batch_size, k, count)),
            torch.randn(batch_size, k, hidden_size),
        )
        for _ in range(config.num_steps - 1)
    ]
    return first, steps


def reference_loop(first: DraftInput, steps, config: SpecConfig) -> tuple[Candidates, list[Lanes]]:
    """Run the reference: the candidates, and the lanes of every step, which are unused after the last."""
    states = [start_lanes(first, config)]
    for step in steps:
        states.append(expand(states[-1], *step, config))
    return states[-1].candidates, states[: max(1, len(steps))]


def lane_scores(lanes: fast_lanes.Lanes, config: SpecConfig) -> torch.Tensor:
    """Compute the scores of the candidates that are the current lanes."""
    first = 1 + min(int(lanes.step[0]), max(0, config.num_steps - 2)) * config.topk
    ids = lanes.candidates.parent_list[:, first : first + config.topk]
    scores = lanes.candidates.scores
    return (scores.gather(1, ids) if config.num_steps > 1 else scores).cpu()


def check_lanes(lanes: fast_lanes.Lanes, expected: Lanes, config: SpecConfig) -> None:
    num_made = expected.path.shape[-1]
    assert torch.equal(lanes.tokens.cpu(), expected.tokens)
    assert torch.equal(lane_scores(lanes, config), expected.scores)
    assert torch.equal(lanes.hidden.cpu(), expected.hidden)
    assert torch.equal(lanes.path.cpu()[..., :num_made].long(), expected.path)
    assert (lanes.path[..., num_made:] == -1).all()


def check_loop(size: int, config: SpecConfig, hidden_size: int, tied: bool, device: str, live_steps: int = 99) -> None:
    """Compare scores bit for bit, as they are products and sums of two numbers.

    live_steps: request 0's steps below max_len.
    """
    first, steps = scripted(size, config, hidden_size, tied)
    for topk_scores, topk_index, _ in steps[live_steps:]:
        topk_scores[0] = 0.0 if config.score == "prob" else -torch.inf
        topk_index[0] = torch.arange(config.topk)
    expected, states = reference_loop(first, steps, config)
    lanes = None
    for _ in range(2):  # the buffers of one draft phase serve the next
        lanes = fast_lanes.start_lanes(first.to(device), config, out=lanes)
        for step, results in enumerate(steps):
            check_lanes(lanes, states[step], config)
            assert lanes.step.tolist() == [step, 0]
            fast.expand(lanes, *(result.to(device) for result in results), config)
        check_lanes(lanes, states[-1], config)
    assert torch.equal(lanes.candidates.tokens.cpu(), expected.tokens)
    assert torch.equal(lanes.candidates.parent_list.cpu(), expected.parent_list)
    assert torch.equal(lanes.candidates.scores.cpu(), expected.scores)
    assert (lanes.candidates.tokens.dtype, lanes.candidates.scores.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
@pytest.mark.parametrize(("k", "num_steps"), [(1, 1), (1, 5), (2, 1), (2, 4), (3, 3), (10, 8), (16, 5)])
def test_fast_lanes_are_the_references_at_every_step(k, num_steps, score, draft_kv, device, gpu_blocks, program_order):
    """Drafts are often equally likely, and some are impossible."""
    config = SpecConfig(k, num_steps, num_steps + 1 if k == 1 else k, score=score, draft_kv=draft_kv)
    check_loop(3 if k < 10 else 2, config, 7, True, device)


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("live_steps", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_fast_lanes_beyond_the_length_limit_are_the_references(k, live_steps, score, device):
    """A dropped row proposes ids 0..K-1 with probability 0, so all its children tie."""
    check_loop(2, SpecConfig(k, 5, 6, score=score, draft_kv="ancestor"), 3, False, device, live_steps)


@pytest.mark.parametrize(("k", "num_steps"), [(1, 1), (1, 4), (3, 1), (3, 2), (3, 4)])
@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
def test_fast_lanes_of_sampled_drafts_are_the_references(k, num_steps, draft_kv, device, gpu_blocks, program_order):
    config = SpecConfig(k, num_steps, 1 + k * num_steps, verifier="multi_round", draft_kv=draft_kv)
    check_loop(3, config, 7, False, device)


@given(st.integers(1, 16), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(1, 5))
@settings(max_examples=25)
def test_fast_lanes_are_the_references_at_any_setting(k, num_steps, size, tied, ancestor, hidden_size):
    config = SpecConfig(k, num_steps, num_steps + 1 if k == 1 else k, draft_kv="ancestor" if ancestor else "lane")
    check_loop(size, config, hidden_size, tied, DEVICE)


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_fast_child_never_scores_above_its_parent(k, score, device):
    config = SpecConfig(k, 2, 3, score=score)
    first, [(topk_scores, *others)] = scripted(2, config, 3, tied=False)
    lanes = fast_lanes.start_lanes(first.to(device), config)
    above = torch.full_like(topk_scores, 1 + EPS if score == "prob" else EPS)
    fast.expand(lanes, *(value.to(device) for value in (above, *others)), config)
    scores = lanes.candidates.scores
    assert torch.equal(scores[:, k:], scores[:, :k].repeat_interleave(k, dim=1))


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_a_chain_is_expanded_as_a_tree_of_one_lane_would_be(
    num_steps, score, device, monkeypatch, gpu_blocks, program_order
):
    config = SpecConfig(1, num_steps, num_steps + 1, score=score)
    first, steps = scripted(3, config, 5, tied=False)
    results = []
    for expansion in (fast._expand_lanes, fast._expand_tree):
        monkeypatch.setattr(fast, "_expand_lanes", expansion)
        lanes = fast_lanes.start_lanes(first.to(device), config)
        for step in steps:
            fast.expand(lanes, *(value.to(device) for value in step), config)
        results.append(lanes.tables)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("k", [1, 3])
def test_nothing_is_written_after_the_last_step(k, device):
    """A graph of the step may be replayed once too often, and then changes only the step number."""
    config = SpecConfig(k, 2, 3)
    first, steps = scripted(2, config, 4, tied=False)
    lanes = fast_lanes.start_lanes(first.to(device), config)
    for _ in range(2):
        fast.expand(lanes, *(value.to(device) for value in steps[0]), config)
        before = [buffer.clone() for buffer in lanes.tables]
        steps[0] = tuple(torch.ones_like(value) for value in steps[0])
    fast.expand(lanes, *(value.to(device) for value in steps[0]), config)
    step, *others = lanes.tables
    assert step.tolist() == [3, 0]
    assert all(torch.equal(one, other) for one, other in zip(others, before[1:], strict=True))


@pytest.mark.parametrize("k", [1, 3])
def test_content_of_padded_requests_changes_no_real_one(k, device, gpu_blocks, program_order):
    config = SpecConfig(k, 4, 5)
    first, steps = scripted(4, config, 6, tied=False)
    expected, states = reference_loop(first.filter(torch.arange(2)), [[v[:2] for v in step] for step in steps], config)
    for value in (first.topk_scores, first.hidden, *(value for p, _, hidden in steps for value in (p, hidden))):
        value[2:] = torch.nan
    lanes = fast_lanes.start_lanes(first.to(device), config)
    for step in steps:
        fast.expand(lanes, *(value.to(device) for value in step), config)
    last = states[-1]
    real = [buffer[:2].cpu() for buffer in lanes.tables[1:]]
    for one, other in zip(real, [last.tokens, last.path.int(), last.hidden], strict=False):
        assert torch.equal(one[..., : other.shape[-1]], other)
    for name in ("tokens", "scores", "parent_list"):
        assert torch.equal(getattr(lanes.candidates, name)[:2].cpu(), getattr(expected, name))
    chosen = select(lanes.candidates.scores, config.num_draft_tokens - 1).cpu()
    assert ((chosen >= 0) & (chosen < config.num_candidates)).all()
    assert (chosen.diff() > 0).all()


def test_fast_drafting_takes_no_request(device):
    config = SpecConfig(3, 3, 9)
    first, steps = scripted(0, config, 4, tied=False)
    lanes = fast_lanes.start_lanes(first.to(device), config)
    fast.expand(lanes, *(value.to(device) for value in steps[0]), config)
    assert select(lanes.candidates.scores, 8).shape == (0, 8)
    assert draft_topk(torch.empty(0, 5, device=device), 2, None)[1].shape == (0, 2)
