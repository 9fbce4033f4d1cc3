"""Drafting kernels are the reference's at any setting."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.columns import own_lanes
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import Batch, Candidates, DraftInput, Sampling
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.fast import drafting as fast
from specsim.fast.vocabulary import topk as fast_topk
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.drafting import (
    child_scores,
    draft_topk,
    parent_ids,
    root_scores,
    select,
)
from specsim.reference.sampling import topk as best_first
from specsim.reference.tree import build

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


V = 5


L = 3  # of every request


BONUS = 4


class Law:
    """A drafter's law: probabilities of the next token for every path of tokens, made up but always the same."""

    def __init__(self, seed: int, dyadic: bool = False):
        self.seed, self.dyadic = seed, dyadic

    def __call__(self, path: tuple[int, ...]) -> list[float]:
        source = random.Random(f"{self.seed} {path}")
        if self.dyadic:
            return source.sample([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16], V)
        weights = [source.random() + 0.01 for _ in range(V)]
        return [weight / sum(weights) for weight in weights]


class PathHead:
    """A head whose hidden state is the path so far, so that a lane with another lane's hidden proposes wrong tokens."""

    kv_layout, feature_layers, draft_vocab_size = KVLayout(1, 1, 1), (), V

    def __init__(self, laws: list[Callable], num_steps: int, d2t: torch.Tensor | None = None):
        self.laws, self.hidden_size, self.d2t, self.forwards = laws, num_steps + 1, d2t, 0

    def start(self) -> torch.Tensor:
        """The number of a request, then no tokens yet."""
        return torch.nn.functional.pad(
            torch.arange(len(self.laws))[:, None].float(), (0, self.hidden_size - 1), value=-1
        )

    def forward(self, input_ids_R, hidden_RH, metadata, kv):
        self.forwards += 1
        return torch.cat([hidden_RH[:, :1], hidden_RH[:, 2:], input_ids_R[:, None].float()], dim=1)

    def logits(self, hidden_RH):
        rows = hidden_RH.int().tolist()
        laws = [self.laws[request](tuple(token for token in path if token >= 0)) for request, *path in rows]
        return torch.tensor(laws, dtype=torch.float64).view(-1, V).log()


def propose(laws: list[Callable], config: SpecConfig, d2t: torch.Tensor | None = None):
    """Candidates of one draft phase, the head that made them, and the trees built from them."""
    head, size, config = PathHead(laws, config.num_steps, d2t), len(laws), replace(config, max_len=99)
    width = config.reserved_columns(L)
    slots = max(size, 1) * width
    buffers = (KVBuffer(head.kv_layout, slots, torch.float32) for _ in range(2))
    pools = KVPool(*buffers, config.page_size, size, width)
    rows = [pools.open() for _ in laws]
    lengths = torch.full((size,), L)
    ids = torch.arange(size)
    sampling = Sampling.of([SamplingParams()] * size, V)
    batch = Batch(ids, torch.tensor(rows, dtype=torch.int64), lengths, lengths, ids, sampling, 0 * ids)
    own_lanes(pools, rows, [L] * size, config)
    drafter, hidden = AutoregressiveDrafter(head, config, torch.float32, V), head.start()
    topk_p, topk_index = draft_topk(head.logits(hidden), config.topk, d2t)
    bonus = torch.full((size,), BONUS, dtype=torch.int32)
    candidates = drafter.propose(batch, DraftInput(topk_p, topk_index, hidden, bonus), pools)
    locations = torch.zeros(size, config.num_draft_tokens, dtype=torch.int64)
    return candidates, head, build(candidates, bonus, lengths, locations, config)


EPS = 2.0**-23


@pytest.fixture
def gpu_blocks(monkeypatch) -> None:
    """As many programs as on a GPU and more: under the interpreter one program would otherwise take all rows."""
    monkeypatch.setattr(fast, "block_of", lambda count, on_gpu, others=1: min(on_gpu, 4))
    monkeypatch.setattr(fast, "_HIDDEN_BLOCK", 4)


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


def scripted(batch_size: int, config: SpecConfig, hidden_size: int, tied: bool):
    """A draft input and what each forward of a draft loop returns: (topk_p, topk_index, hidden)."""
    k = config.topk

    def chances(*shape):
        return torch.randint(0, 5, shape) / 4 if tied else torch.rand(shape)

    bonus = torch.randint(0, 9, (batch_size,), dtype=torch.int32)
    first = DraftInput(
        chances(batch_size, k), torch.randint(0, 99, (batch_size, k)), torch.randn(batch_size, hidden_size), bonus
    )
    steps = [
        (
            chances(batch_size, k, k),
            torch.randint(0, 99, (batch_size, k, k)),
            torch.randn(batch_size, k, hidden_size),
        )
        for _ in range(config.num_steps - 1)
    ]
    return first, steps


def reference_loop(first: DraftInput, steps, config: SpecConfig):
    """(candidates, lanes of every step as (tokens, scores, hidden, path)), by the reference's drafting functions."""
    k, size = config.topk, len(first.topk_p)
    tokens_BK, scores_BK = first.topk_index, root_scores(first.topk_p, config.score)
    hidden_BKH, own = first.hidden[:, None].expand(-1, k, -1), torch.arange(k)[None, :, None].expand(size, k, 1)
    path_BKI, lanes, tokens, scores = own, [(tokens_BK, scores_BK, hidden_BKH, own)], [tokens_BK], [scores_BK]
    parent_list = [torch.arange(-1, k if config.num_steps > 1 else 0).expand(size, -1)]
    for step, (topk_p, topk_index, hidden) in enumerate(steps, start=1):
        children = child_scores(scores_BK, topk_p, config.score).flatten(1)
        tokens.append(topk_index.flatten(1))
        scores.append(children)
        if step == len(steps):
            break
        scores_BK, chosen_BK = best_first(children, k)
        tokens_BK, parents_BK1 = tokens[-1].gather(1, chosen_BK), chosen_BK[..., None] // k
        hidden_BKH = hidden.gather(1, parents_BK1.expand_as(hidden))
        if config.draft_kv == "ancestor":
            path_BKI = path_BKI.gather(1, parents_BK1.expand_as(path_BKI))
        path_BKI = torch.cat([path_BKI, own], dim=-1)
        parent_list.append(parent_ids(step, chosen_BK, k))
        lanes.append((tokens_BK, scores_BK, hidden_BKH, path_BKI))
    return Candidates(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parent_list, 1)), lanes


def lane_scores(lanes: fast.Lanes, config: SpecConfig) -> torch.Tensor:
    """The scores of the candidates that are the lanes now."""
    first = 1 + min(int(lanes.step[0]), max(0, config.num_steps - 2)) * config.topk
    ids = lanes.candidates.parent_list[:, first : first + config.topk]
    scores = lanes.candidates.scores
    return (scores.gather(1, ids) if config.num_steps > 1 else scores).cpu()


def check_lanes(lanes: fast.Lanes, expected, config: SpecConfig, exact: bool) -> None:
    tokens, scores, hidden, path = expected
    assert torch.equal(lanes.tokens.cpu(), tokens)
    check_scores(lane_scores(lanes, config), scores, config, exact)
    assert torch.equal(lanes.hidden.cpu(), hidden)
    assert torch.equal(lanes.path.cpu()[..., : path.shape[-1]].long(), path)
    assert (lanes.path[..., path.shape[-1] :] == -1).all()


def check_scores(scores, expected, config: SpecConfig, exact: bool) -> None:
    """Bit for bit, but for logarithms, of which two libraries may each be a unit in the last place off."""
    if exact:
        assert torch.equal(scores, expected)
    else:
        torch.testing.assert_close(scores, expected, rtol=4 * config.num_steps * EPS, atol=4 * config.num_steps * EPS)


def check_loop(size: int, config: SpecConfig, hidden_size: int, tied: bool, device: str, live_steps: int = 99) -> None:
    """live_steps: how many steps of the first request lie below max_len."""
    first, steps = scripted(size, config, hidden_size, tied)
    for topk_p, topk_index, _ in steps[live_steps:]:
        topk_p[0], topk_index[0] = 0.0, torch.arange(config.topk)
    expected, states = reference_loop(first, steps, config)
    exact = config.score == "prob"
    lanes = fast.Lanes.empty(size, hidden_size, config, torch.float32, device)
    for _ in range(2):  # the buffers of one draft phase serve the next
        fast.start_lanes(first.to(device), lanes, config)
        for step, results in enumerate(steps):
            check_lanes(lanes, states[step], config, exact)
            assert lanes.step.tolist() == [step, 0]
            fast.expand(lanes, *(result.to(device) for result in results), config)
        check_lanes(lanes, states[-1], config, exact)
    assert torch.equal(lanes.candidates.tokens.cpu(), expected.tokens)
    assert torch.equal(lanes.candidates.parent_list.cpu(), expected.parent_list)
    check_scores(lanes.candidates.scores.cpu(), expected.scores, config, exact)
    assert (lanes.candidates.tokens.dtype, lanes.candidates.scores.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize(("tied", "score"), [(True, "prob"), (False, "logprob")])
@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
@pytest.mark.parametrize(("k", "num_steps"), [(1, 1), (1, 5), (2, 1), (2, 4), (3, 3), (10, 8), (16, 5)])
def test_fast_lanes_are_the_references_at_every_step(
    k, num_steps, tied, score, draft_kv, device, gpu_blocks, program_order
):
    config = SpecConfig(k, num_steps, num_steps + 1 if k == 1 else k, score=score, draft_kv=draft_kv)
    check_loop(3 if k < 10 else 2, config, 7, tied, device)


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("live_steps", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 3])
def test_fast_lanes_beyond_the_length_limit_are_the_references(k, live_steps, score, device):
    """A dropped row proposes ids 0..K-1 with probability 0: all its children tie."""
    check_loop(2, SpecConfig(k, 5, 6, score=score, draft_kv="ancestor"), 3, False, device, live_steps)


@given(st.integers(1, 16), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans(), st.integers(1, 5))
@settings(max_examples=25)
def test_fast_lanes_are_the_references_at_any_setting(k, num_steps, size, tied, ancestor, hidden_size):
    config = SpecConfig(k, num_steps, num_steps + 1 if k == 1 else k, draft_kv="ancestor" if ancestor else "lane")
    check_loop(size, config, hidden_size, tied, DEVICE)


@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("k", [1, 2])
def test_a_fast_child_never_scores_above_its_parent(k, score, device):
    config = SpecConfig(k, 2, 3, score=score)
    first, [(topk_p, *others)] = scripted(2, config, 3, tied=False)
    lanes = fast.Lanes.empty(2, 3, config, torch.float32, device)
    fast.start_lanes(first.to(device), lanes, config)
    fast.expand(lanes, *(value.to(device) for value in (torch.full_like(topk_p, 1 + EPS), *others)), config)
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
        lanes = fast.Lanes.empty(3, 5, config, torch.float32, device)
        fast.start_lanes(first.to(device), lanes, config)
        for step in steps:
            fast.expand(lanes, *(value.to(device) for value in step), config)
        results.append(lanes.tables)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("k", [1, 3])
def test_nothing_is_written_after_the_last_step(k, device):
    """A graph of the step may be replayed once too often: only the step number goes on."""
    config = SpecConfig(k, 2, 3)
    first, steps = scripted(2, config, 4, tied=False)
    lanes = fast.Lanes.empty(2, 4, config, torch.float32, device)
    fast.start_lanes(first.to(device), lanes, config)
    for _ in range(2):
        fast.expand(lanes, *(value.to(device) for value in steps[0]), config)
        before = [buffer.clone() for buffer in lanes.tables]
        steps[0] = tuple(torch.ones_like(value) for value in steps[0])
    fast.expand(lanes, *(value.to(device) for value in steps[0]), config)
    step, *others = lanes.tables
    assert step.tolist() == [3, 0]
    assert all(torch.equal(one, other) for one, other in zip(others, before[1:], strict=True))


@pytest.mark.parametrize("k", [1, 3])
def test_junk_of_padded_requests_changes_no_real_one(k, device, gpu_blocks, program_order):
    config = SpecConfig(k, 4, 5)
    first, steps = scripted(4, config, 6, tied=False)
    expected, states = reference_loop(first.filter(torch.arange(2)), [[v[:2] for v in step] for step in steps], config)
    for value in (first.topk_p, first.hidden, *(value for p, _, hidden in steps for value in (p, hidden))):
        value[2:] = torch.nan
    lanes = fast.Lanes.empty(4, 6, config, torch.float32, device)
    fast.start_lanes(first.to(device), lanes, config)
    for step in steps:
        fast.expand(lanes, *(value.to(device) for value in step), config)
    tokens, _, hidden, path = states[-1]
    real = [buffer[:2].cpu() for buffer in lanes.tables[1:]]
    for one, other in zip(real, [tokens, path.int(), hidden], strict=False):
        assert torch.equal(one[..., : other.shape[-1]], other)
    for name in ("tokens", "scores", "parent_list"):
        assert torch.equal(getattr(lanes.candidates, name)[:2].cpu(), getattr(expected, name))
    chosen = fast.select(lanes.candidates.scores, config.num_draft_tokens - 1).cpu()
    assert ((chosen >= 0) & (chosen < config.num_candidates)).all()
    assert (chosen.diff() > 0).all()


@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (1, 3), (2, 3), (3, 3), (5, 3), (4, 4)]), st.booleans())
@settings(max_examples=15)
def test_the_fast_draft_loop_proposes_the_references_candidates(seed, setting, mapped):
    """Laws without near ties, through both columns' top-k: tokens and parents exactly, scores to rounding."""
    topk, num_steps = setting
    config = SpecConfig(topk, num_steps, num_steps + 1 if topk == 1 else topk + 1)
    laws, d2t = [Law(seed), Law(seed + 1)], torch.tensor([0, 1, 3, 3, 6]) if mapped else None
    expected, head, _ = propose(laws, config, d2t)
    hidden = head.start()
    bonus = torch.full((2,), BONUS, dtype=torch.int32)
    offsets = None if d2t is None else d2t.to(DEVICE)
    topk_p, topk_index = fast_topk.draft_topk(head.logits(hidden).float().to(DEVICE), topk, offsets)
    lanes = fast.Lanes.empty(2, head.hidden_size, config, torch.float32, DEVICE)
    fast.start_lanes(DraftInput(topk_p, topk_index, hidden.to(DEVICE), bonus.to(DEVICE)), lanes, config)
    for _ in range(num_steps - 1):
        hidden_RH = head.forward(lanes.tokens.flatten().cpu(), lanes.hidden.flatten(0, 1).cpu(), None, None)
        results = *fast_topk.draft_topk(head.logits(hidden_RH).float().to(DEVICE), topk, offsets), hidden_RH.to(DEVICE)
        fast.expand(lanes, *(rows.unflatten(0, (2, topk)) for rows in results), config)
    assert torch.equal(lanes.candidates.tokens.cpu(), expected.tokens)
    assert torch.equal(lanes.candidates.parent_list.cpu(), expected.parent_list)
    torch.testing.assert_close(lanes.candidates.scores.cpu(), expected.scores, rtol=1e-5, atol=0)


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
def test_fast_select_orders_junk_too(count, device):
    """NaN above every number, as the reference's sort has it."""
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([[nan] * 9, [0.0, -0.0, 1, -inf, nan, inf, -1, 2, -nan], [-inf] * 9, [1e-45, -1e-45, 0] * 3])
    assert torch.equal(fast.select(scores.to(device), count).cpu(), select(scores, count))


def test_fast_select_refuses_more_than_there_are(device):
    with pytest.raises(ValueError, match="candidates"):
        fast.select(torch.zeros(1, 3, device=device), 4)


def test_fast_drafting_takes_no_request(device):
    config = SpecConfig(3, 3, 9)
    first, steps = scripted(0, config, 4, tied=False)
    lanes = fast.Lanes.empty(0, 4, config, torch.float32, device)
    fast.start_lanes(first.to(device), lanes, config)
    fast.expand(lanes, *(value.to(device) for value in steps[0]), config)
    assert fast.select(lanes.candidates.scores, 8).shape == (0, 8)
    assert fast_topk.draft_topk(torch.empty(0, 5, device=device), 2, None)[1].shape == (0, 2)
