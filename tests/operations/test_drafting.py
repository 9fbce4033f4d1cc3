import collections
import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from specsim.core.columns import reserve_lanes
from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.phases import AutoregressiveInput, Batch, Candidates, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.fast.drafting import expand as expand_fast_lanes
from specsim.fast.drafting.lanes import start_lanes as start_fast_lanes
from specsim.fast.tree import build as build_fast_tree
from specsim.fast.vocabulary.topk import draft_topk as fast_draft_topk
from specsim.reference.drafters.autoregressive import AutoregressiveDrafter
from specsim.reference.drafting import child_scores, draft_distribution, draft_topk, expand, sampled, start_lanes
from specsim.reference.sampling import topk as best_first
from specsim.reference.tree import build, select
from specsim.reference.verify import walk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V = 5
L = 3  # of every request
BONUS = 4


class MadeUp:
    """A made-up drafter with probabilities of the next token for every path of tokens, always the same.

    spread: of the logits. Two tokens are likely; the others' logits are lower by at least half the spread, and at 300
    their probabilities are 0 in float32.
    """

    def __init__(self, seed: int, dyadic: bool = False, spread: float | None = None):
        self.seed, self.dyadic, self.spread = seed, dyadic, spread

    def __call__(self, path: tuple[int, ...]) -> list[float]:
        source = random.Random(f"{self.seed} {path}")
        if self.dyadic:
            return source.sample([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 16], V)
        weights = [source.random() + 0.01 for _ in range(V)]
        if self.spread:
            weights[2:] = [math.exp(-self.spread * source.uniform(0.5, 1)) for _ in weights[2:]]
            source.shuffle(weights)
        return [weight / sum(weights) for weight in weights]


class PathHead:
    """A head whose hidden state is the path so far, so that a lane with another's hidden proposes wrong tokens."""

    kv_layout, feature_layers, draft_vocab_size, bonus_columns = KVLayout(1, 1, 1), (), V, 0

    def __init__(self, models: list[Callable], num_steps: int, d2t: torch.Tensor | None = None):
        self.models, self.hidden_size, self.d2t, self.forwards = models, num_steps + 1, d2t, 0

    def start(self) -> torch.Tensor:
        """Encode the number of a request, then no tokens yet."""
        return torch.nn.functional.pad(
            torch.arange(len(self.models))[:, None].float(), (0, self.hidden_size - 1), value=-1
        )

    def forward(self, input_ids_R, hidden_RH, metadata, kv):
        self.forwards += 1
        return torch.cat([hidden_RH[:, :1], hidden_RH[:, 2:], input_ids_R[:, None].float()], dim=1)

    def logits(self, hidden_RH):
        rows = hidden_RH.int().tolist()
        models = [self.models[request](tuple(token for token in path if token >= 0)) for request, *path in rows]
        return torch.tensor(models, dtype=torch.float64).view(-1, V).log()


def drafting_state(head: PathHead, config: SpecConfig, params: SamplingParams):
    """Make a drafter of a head, a batch with one request for each distribution, and pools with their lanes reserved."""
    size = len(head.models)
    width = config.reserved_columns(L)
    buffers = (KVBuffer(head.kv_layout, max(size, 1) * width, torch.float32) for _ in range(2))
    pools = KVPool(*buffers, config.page_size, size, width)
    rows = [pools.open() for _ in range(size)]
    reserve_lanes(pools, rows, [L] * size, config)
    batch = Batch.of(range(size), rows, [L] * size, [replace(params, seed=3)] * size, V)
    return AutoregressiveDrafter(head, config, torch.float32, V), batch, pools


def tree_of(candidates: Candidates, batch: Batch, config: SpecConfig) -> VerifyInput:
    locations = torch.zeros(batch.size, config.num_draft_tokens, dtype=torch.int64)
    return build(candidates, torch.full((batch.size,), BONUS, dtype=torch.int32), batch.seq_lens, locations, config)


def propose(models: list[Callable], config: SpecConfig, d2t: torch.Tensor | None = None):
    """Run one draft phase: its candidates, the head that made them, and the trees built from them."""
    config = replace(config, max_len=99)
    head = PathHead(models, config.num_steps, d2t)
    drafter, batch, pools = drafting_state(head, config, SamplingParams())
    hidden = head.start()
    drafts = draft_topk(head.logits(hidden), config.topk, d2t, score=config.score)
    bonus = torch.full((batch.size,), BONUS, dtype=torch.int32)
    candidates = drafter.propose(batch, AutoregressiveInput(bonus, *drafts, hidden), pools)
    return candidates, head, tree_of(candidates, batch, config)


def paths(verify_input, request: int) -> list[tuple[int, ...]]:
    """List the tokens below the root of every node."""
    tokens, parents = verify_input.draft_tokens[request].tolist(), verify_input.parents[request].tolist()
    found = [()]
    for token, parent in list(zip(tokens, parents, strict=True))[1:]:
        found.append((*found[parent], token))
    return found


def product(model: MadeUp, path: tuple[int, ...]) -> float:
    score = 1.0
    for depth, token in enumerate(path):
        score *= model(path[:depth])[token]
    return score


def log_product(model: MadeUp, path: tuple[int, ...]) -> float:
    return sum(math.log(model(path[:depth])[token]) for depth, token in enumerate(path))


def best_paths(model: MadeUp, topk: int, num_steps: int, score: Callable = product) -> list[tuple[int, ...]]:
    """List the candidates as paths, in order: K best tokens of each of a step's K best paths."""

    def best(paths):
        return sorted(paths, key=lambda path: -score(model, path))[:topk]  # stable: the earlier of equals

    lanes = best([(token,) for token in range(V)])
    pool = list(lanes)
    for _ in range(num_steps - 1):
        children = [child for lane in lanes for child in best([(*lane, token) for token in range(V)])]
        lanes = best(children)
        pool += children
    return pool


def best_tree(pool: list[tuple[int, ...]], scores: list[float], num_nodes: int) -> list[tuple[int, ...]]:
    """List the root and the best of the candidates, in their order."""
    ranked = sorted(range(len(pool)), key=lambda flat: -scores[flat])
    return [(), *(pool[flat] for flat in sorted(ranked[: num_nodes - 1]))]


settings_of_trees = st.tuples(st.integers(1, V), st.integers(1, 4)).flatmap(
    lambda ks: st.tuples(
        st.just(ks[0]),
        st.just(ks[1]),
        st.integers(2, min(20, ks[0] + (ks[1] - 1) * ks[0] ** 2 + 1)) if ks[0] > 1 else st.just(ks[1] + 1),
    )
)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("score", ["prob", "logprob"])
@pytest.mark.parametrize("draft_kv", ["lane", "ancestor"])
def test_a_tree_of_at_most_k_drafts_is_the_best_of_all_paths(seed, score, draft_kv):
    """K lanes include the K most probable of all 5 + 25 + 125 paths, as products fall along a path."""
    model = MadeUp(seed)
    everything = [path for length in (1, 2, 3) for path in itertools.product(range(V), repeat=length)]
    config = SpecConfig(topk=4, num_steps=3, num_draft_tokens=5, page_size=2, draft_kv=draft_kv, score=score)
    _, _, verify_input = propose([model], config)
    best = sorted(everything, key=lambda path: -product(model, path))[:4]
    assert set(paths(verify_input, 0)) == {(), *best}


@given(st.integers(0, 10**6), settings_of_trees, st.booleans(), st.sampled_from([1, 3]))
@settings(max_examples=60)
def test_candidates_and_tree_are_the_naive_ones(seed, setting, dyadic, page_size):
    """Scores of dyadic probabilities are exact in float32 and often tied, so that order decides."""
    topk, num_steps, num_draft_tokens = setting
    model = MadeUp(seed, dyadic)
    candidates, head, verify_input = propose([model], SpecConfig(*setting, page_size))
    pool = best_paths(model, topk, num_steps)
    assert candidates.tokens[0].tolist() == [path[-1] for path in pool]
    assert candidates.scores[0].tolist() == pytest.approx([product(model, path) for path in pool], rel=1e-6)
    assert head.forwards == num_steps - 1
    assert paths(verify_input, 0) == best_tree(pool, [product(model, path) for path in pool], num_draft_tokens)


def test_requests_are_drafted_each_with_its_own_distribution():
    models, config = [MadeUp(1), MadeUp(2), MadeUp(1, dyadic=True)], SpecConfig(3, 3, 9, page_size=4)
    _, _, together = propose(models, config)
    for request, model in enumerate(models):
        _, _, alone = propose([model], config)
        assert paths(together, request) == paths(alone, 0)
        assert torch.equal(together.scores[request], alone.scores[0])


def test_no_request_has_no_candidates():
    candidates, _, verify_input = propose([], SpecConfig(3, 3, 9, page_size=4))
    assert candidates.tokens.shape == candidates.scores.shape == (0, 21)
    assert candidates.parent_list.shape == (0, 7)
    assert (candidates.tokens.dtype, candidates.parent_list.dtype) == (torch.int64, torch.int64)
    assert verify_input.draft_tokens.shape == (0, 9)


def test_every_candidate_is_mapped_to_a_target_id_once():
    def memoryless(path):
        return [0.1, 0.3, 0.2, 0.25, 0.15]

    d2t, config = torch.tensor([0, 1, 3, 3, 6]), SpecConfig(3, 3, 9)  # offsets: the target ids are 0, 2, 5, 6 and 10
    mapped, _, _ = propose([memoryless], config, d2t)
    unmapped, _, _ = propose([memoryless], config)
    assert mapped.tokens.tolist() == [[(0, 2, 5, 6, 10)[token] for token in unmapped.tokens[0].tolist()]]
    assert torch.equal(mapped.scores, unmapped.scores)
    assert torch.equal(mapped.parent_list, unmapped.parent_list)


def test_draft_topk_is_the_softmax_by_target_id():
    logits = torch.tensor([[1.0, 2.0, 8.0, 4.0], [8.0, 8.0, 4.0, 8.0]]).log()
    d2t = torch.tensor([0, 3, 3, 10])  # draft ids 0..3 are target ids 0, 4, 5, 13
    prob, target_ids = draft_topk(logits, 3, d2t)
    torch.testing.assert_close(prob, torch.tensor([[8 / 15, 4 / 15, 2 / 15], [8 / 28] * 3]))
    assert target_ids.tolist() == [[5, 13, 4], [0, 4, 13]]
    assert (prob.dtype, target_ids.dtype) == (torch.float32, torch.int64)
    assert draft_topk(logits, 3, None)[1].tolist() == [[2, 3, 1], [0, 1, 3]]


def test_draft_topk_under_logprob_is_the_log_softmax():
    """The rows are one of equal logits, one whose second token's probability is 0 in float32, and a dropped one."""
    logits = torch.tensor([[5.0, 5.0], [-400.0, 0.0], [1.0, 2.0]])
    scores, target_ids = draft_topk(logits, 2, None, torch.tensor([0, 1, -1]), "logprob")
    expected = torch.tensor([[-math.log(2)] * 2, [0.0, -400.0], [-math.inf] * 2])
    torch.testing.assert_close(scores, expected)
    assert target_ids.tolist() == [[0, 1], [1, 0], [0, 1]]
    assert scores.dtype == torch.float32


def scores_of(prob: torch.Tensor, score: str) -> torch.Tensor:
    """Compute scores of drafts from their probabilities."""
    return prob if score == "prob" else prob.log()


@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_scores_multiply_along_the_path(score):
    first, then = torch.tensor([[0.5, 0.25]]), torch.tensor([[[0.5, 0.125], [0.75, 0.25]]])
    scores = child_scores(scores_of(first, score), scores_of(then, score), score)
    probs = scores if score == "prob" else scores.exp()
    torch.testing.assert_close(probs, torch.tensor([[[0.25, 0.0625], [0.1875, 0.0625]]]))
    assert scores.dtype == torch.float32


@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_a_child_never_scores_above_its_parent(score):
    """A softmax in float32 may exceed 1 by its last bit."""
    parents = scores_of(torch.tensor([[0.3, 1.0]]), score)
    above = scores_of(torch.full((1, 2, 2), 1 + 2.0**-23), score)
    assert torch.equal(child_scores(parents, above, score), parents[:, :, None].expand(1, 2, 2))


@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_impossible_drafts_score_lowest_and_stay_comparable(score):
    parents = torch.tensor([[0.5, 0.0]])
    children = torch.tensor([[[0.5, 0.0], [0.5, 0.0]]])
    scores = child_scores(scores_of(parents, score), scores_of(children, score), score)
    assert not scores.isnan().any()
    assert select(scores.flatten(1), 2).tolist() == [[0, 1]]


def test_scoring_changes_nothing_in_place():
    first, then = torch.tensor([[0.5, 0.25]]), torch.rand(1, 2, 2)
    copies = first.clone(), then.clone()
    for score in ("prob", "logprob"):
        child_scores(first, then, score)
    select(first, 1)
    assert torch.equal(first, copies[0])
    assert torch.equal(then, copies[1])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_parent_list_counts_the_candidates_before(k):
    num_steps = 5
    sizes = [k] + [k * k] * (num_steps - 1)
    numbered = [(step, index) for step, size in enumerate(sizes) for index in range(size)]
    config = SpecConfig(k, num_steps, num_steps + 1)
    ids = torch.zeros(1, k, k, dtype=torch.int64)
    hidden = torch.zeros(1, k, 1)
    lanes = start_lanes(AutoregressiveInput(torch.zeros(1), torch.ones(1, k), ids[:, 0], hidden[:, 0]), config)
    parents = [-1, *range(k)]
    for step in range(1, num_steps):
        assert lanes.candidates.parent_list.tolist() == [parents]
        best = torch.randperm(k * k)[:k]
        prob = torch.zeros(k * k).index_put((best,), 1 - torch.arange(k) / 8).view(1, k, k)
        lanes = expand(replace(lanes, scores=torch.ones(1, k)), prob, ids, hidden, config)
        if step < num_steps - 1:  # the last candidates have no children
            parents += [numbered.index((step, index)) for index in best.tolist()]
    assert lanes.candidates.parent_list.tolist() == [parents]


@given(st.integers(0, 10**6), st.sampled_from([(1, 1), (1, 3), (2, 3), (3, 3), (5, 3), (4, 4)]), st.booleans())
@settings(max_examples=15)
def test_the_fast_draft_loop_proposes_the_references_candidates(seed, setting, mapped):
    """Distributions have no near ties.

    Tokens and parents are compared exactly, scores within rounding error.
    """
    topk, num_steps = setting
    config = SpecConfig(topk, num_steps, num_steps + 1 if topk == 1 else topk + 1)
    models = [MadeUp(seed), MadeUp(seed + 1)]
    d2t = torch.tensor([0, 1, 3, 3, 6]) if mapped else None
    expected, _, _ = propose(models, config, d2t)
    candidates = propose_fast(models, config, d2t)
    assert torch.equal(candidates.tokens, expected.tokens)
    assert torch.equal(candidates.parent_list, expected.parent_list)
    torch.testing.assert_close(candidates.scores, expected.scores, rtol=1e-5, atol=0)


def propose_fast(models: list[Callable], config: SpecConfig, d2t: torch.Tensor | None = None) -> Candidates:
    """Run one fast draft loop, and copy its candidates to the CPU."""
    k = config.topk
    size = len(models)
    head = PathHead(models, config.num_steps, d2t)
    offsets = None if d2t is None else d2t.to(DEVICE)

    def drafts(hidden_RH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return fast_draft_topk(head.logits(hidden_RH).float().to(DEVICE), k, offsets, score=config.score)

    hidden = head.start()
    bonus = torch.full((size,), BONUS, dtype=torch.int32)
    lanes = start_fast_lanes(AutoregressiveInput(bonus.to(DEVICE), *drafts(hidden), hidden.to(DEVICE)), config)
    for _ in range(config.num_steps - 1):
        hidden_RH = head.forward(lanes.tokens.flatten().cpu(), lanes.hidden.flatten(0, 1).cpu(), None, None)
        results = *drafts(hidden_RH), hidden_RH.to(DEVICE)
        expand_fast_lanes(lanes, *(rows.unflatten(0, (size, k)) for rows in results), config)
    return lanes.candidates.to("cpu")


def build_fast(candidates: Candidates, config: SpecConfig):
    """Build the fast trees of candidates, and copy them to the CPU."""
    size = len(candidates.tokens)
    bonus = torch.full((size,), BONUS, dtype=torch.int32)
    locations = torch.zeros(size, config.num_draft_tokens, dtype=torch.int64)
    inputs = (each.to(DEVICE) for each in (candidates, bonus, torch.full((size,), L), locations))
    return build_fast_tree(*inputs, config).to("cpu")


SPREAD = 300
SETTINGS_OF_SCORES = [(1, 1, 2), (1, 4, 5), (3, 4, 25), (5, 3, 20)]


@pytest.mark.parametrize("seed", range(1, 4))
@pytest.mark.parametrize("setting", SETTINGS_OF_SCORES, ids=str)
def test_log_scores_rank_drafts_whose_probability_underflows(setting, seed):
    """Both implementations propose and select the same as float64 from logits spread over 300.

    Budget of a score: a rounding of two logits and a normaliser in every step, and one of each sum.
    """
    topk, num_steps, num_draft_tokens = setting
    config = SpecConfig(*setting, page_size=1, score="logprob")
    model = functools.cache(MadeUp(seed, spread=SPREAD))
    pool = best_paths(model, topk, num_steps, log_product)
    exact = [log_product(model, path) for path in pool]
    budget = num_steps * (3 + num_steps) * SPREAD * 2.0**-24
    assert all(above - below > 2 * budget for below, above in itertools.pairwise(sorted(exact)))
    best = best_tree(pool, exact, num_draft_tokens)
    assert topk == 1 or min(math.exp(log_product(model, path)) for path in best) < 2.0**-149
    expected, _, tree = propose([model], config)
    fast = propose_fast([model], config)
    for candidates in (expected, fast):
        assert candidates.tokens[0].tolist() == [path[-1] for path in pool]
        assert candidates.scores[0].tolist() == pytest.approx(exact, rel=0, abs=budget)
    assert torch.equal(fast.parent_list, expected.parent_list)
    for own in (tree, build_fast(fast, config)):
        assert paths(own, 0) == best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("setting", SETTINGS_OF_SCORES, ids=str)
def test_both_scores_give_one_tree_where_nothing_underflows(setting, seed):
    configs = [SpecConfig(*setting, page_size=1, score=score) for score in ("prob", "logprob")]
    models = [MadeUp(seed), MadeUp(seed + 10)]
    plain = [propose(models, config)[::2] for config in configs]
    fast = [(candidates := propose_fast(models, config), build_fast(candidates, config)) for config in configs]
    for (of_probs, tree), (of_logs, log_tree) in (plain, fast):
        assert torch.equal(of_logs.tokens, of_probs.tokens)
        assert torch.equal(of_logs.parent_list, of_probs.parent_list)
        torch.testing.assert_close(of_logs.scores.exp(), of_probs.scores, rtol=1e-5, atol=0)
        assert torch.equal(log_tree.draft_tokens, tree.draft_tokens)
        assert torch.equal(log_tree.parents, tree.parents)


SAMPLED = {
    "rejection": SpecConfig(1, 2, 3, page_size=1, verifier="rejection"),
    "block": SpecConfig(1, 2, 3, page_size=1, verifier="block"),
    "multi_round": SpecConfig(2, 2, 5, page_size=1, verifier="multi_round"),
    "recursive": SpecConfig(2, 2, 5, page_size=1, verifier="recursive"),
    "gumbel": SpecConfig(1, 2, 3, page_size=1, verifier="gumbel"),
}
SAMPLES = 2500
FALSE_ALARM = 1e-6
LOGITS_RV = torch.tensor([[0.5, 2.0, -1.0], [1.0, 1.0, 3.0], [0.0, 4.0, 0.0], [2.0, 1.0, 0.0]])


def test_draft_distribution_is_the_softmax_at_the_temperature():
    """Draft ids 0, 1, 2 are target ids 1, 2, 4.

    The third row is greedy and the last was dropped.
    """
    d2t, slots = torch.tensor([1, 1, 2]), torch.tensor([3, 0, 5, -1])
    draft_prob = draft_distribution(LOGITS_RV, torch.tensor([1.0, 0.5, 0.0, 1.0]).double(), d2t, slots, V)
    assert draft_prob.dtype == torch.float32
    expected = torch.zeros(4, V)
    expected[0, [1, 2, 4]] = LOGITS_RV[0].softmax(-1)
    expected[1, [1, 2, 4]] = (2 * LOGITS_RV[1]).softmax(-1)
    torch.testing.assert_close(draft_prob, expected)


def test_draft_distribution_near_temperature_0_is_a_point():
    draft_prob = draft_distribution(LOGITS_RV[:1], torch.tensor([5e-324], dtype=torch.float64), None, None, 3)
    assert draft_prob.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_every_draft_is_drawn_with_its_own_uniform(score):
    best = draft_topk(LOGITS_RV[:2], 2, None, score=score)
    draft_prob = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 0.0]])
    scores, ids = sampled(best, draft_prob, torch.tensor([[0.3, 0.7], [0.3, 0.7]]), score=score)
    assert ids.tolist() == [[1, 1], [2, 0]]
    assert torch.equal(scores[0], scores_of(torch.tensor([0.5, 0.5]), score))
    assert torch.equal(scores[1], best[0][1])


def test_distinct_drafts_are_drawn_without_replacement():
    best = draft_topk(LOGITS_RV[:1], 3, None)
    draft_prob, found = torch.tensor([[0.5, 0.25, 0.25]]), collections.Counter()
    for uniforms in itertools.product(((cell + 0.5) / 12 for cell in range(12)), repeat=3):
        _, ids = sampled(best, draft_prob, torch.tensor([uniforms]), is_distinct=True)
        found[tuple(ids[0].tolist())] += 1
    # Of 12³: P(x, y) = q(x) q(y) / (1 - q(x)), and the third token is certain.
    assert found == {(0, 1, 2): 432, (0, 2, 1): 432, (1, 0, 2): 288, (1, 2, 0): 144, (2, 0, 1): 288, (2, 1, 0): 144}


def test_distinct_drafts_repeat_where_q_has_no_other_token():
    best = draft_topk(LOGITS_RV[:1], 3, None)
    scores, ids = sampled(best, torch.tensor([[0.0, 0.75, 0.25]]), torch.tensor([[0.9, 0.9, 0.1]]), is_distinct=True)
    assert (ids.tolist(), scores.tolist()) == ([[2, 1, 1]], [[0.25, 0.75, 0.75]])


@pytest.mark.parametrize("score", ["prob", "logprob"])
def test_drafts_with_noise_are_the_argmax_with_it(score):
    best, draft_prob = draft_topk(LOGITS_RV[:1], 1, None, score=score), torch.tensor([[0.25, 0.75, 0.0]])
    for noise, token in (([0.0, 0.0, 99.0], 1), ([1.2, 0.0, 0.0], 0), ([math.log(3), 0.0, 0.0], 0)):
        scores, ids = sampled(best, draft_prob, None, torch.tensor([noise]).double(), score)
        assert ids.tolist() == [[token]]
        assert torch.equal(scores[0], scores_of(draft_prob[0, [token]], score))


def sampled_trees(config: SpecConfig, size: int, sampling: SamplingParams):
    """Run one draft phase of `size` requests with the same distributions, with first drafts as from draft-extend."""
    config = replace(config, max_len=99)
    model = functools.cache(MadeUp(17))
    head = PathHead([model] * size, config.num_steps)
    drafter, batch, pools = drafting_state(head, config, sampling)
    bonus = torch.full((size,), BONUS, dtype=torch.int32)
    draft_input = drafter._first_drafts(batch, head.start(), bonus, batch.seq_lens)
    return batch, model, tree_of(drafter.propose(batch, draft_input, pools), batch, config)


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_drafts_pass_on_distributions_of_all_parents(name):
    config, temperature = SAMPLED[name], 1.7
    _, model, tree = sampled_trees(config, 3, SamplingParams(temperature=temperature))
    k, depth = config.topk, config.num_steps
    assert tree.parents.tolist() == [[-1, *[0] * k, *range(1, k * (depth - 1) + 1)]] * 3
    if not config.has_draft_prob:
        assert tree.draft_prob is None
        return
    assert tree.draft_prob.shape == (3, config.num_parents, V)
    for request in range(3):
        for node, path in enumerate(paths(tree, request)[: config.num_parents]):
            weights = torch.tensor(model(path), dtype=torch.float64) ** (1 / temperature)
            torch.testing.assert_close(tree.draft_prob[request, node].double(), weights / weights.sum())
    children = tree.parents[:, 1:, None].expand(-1, -1, V)
    drawn = tree.draft_prob.gather(1, children).gather(2, tree.draft_tokens[:, 1:, None])[..., 0]
    above = tree.scores.gather(1, tree.parents[:, 1:])
    torch.testing.assert_close(tree.scores[:, 1:], drawn * above)


@pytest.mark.parametrize("name", SAMPLED)
def test_greedy_requests_draft_the_best_lanes(name):
    """Children of the root are distinct, followed by the best child of every lane."""
    config = SAMPLED[name]
    _, model, tree = sampled_trees(config, 1, SamplingParams())
    assert tree.draft_prob is None or not tree.draft_prob.any()
    first = best_first(torch.tensor(model(())), config.topk)[1].tolist()
    second = [max(range(V), key=model((token,)).__getitem__) for token in first]
    assert tree.draft_tokens.tolist() == [[BONUS, *first, *second]]


def emitted(name: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Run rounds of requests with the same distributions: their first two tokens i64 [size], and the distribution [V²].

    Where a round emits only one token, the target's distribution gives the other.
    """
    config = SAMPLED[name]
    batch, _, tree = sampled_trees(config, size, SamplingParams(temperature=1.0))
    target = functools.cache(MadeUp(23))
    logits = [[target(path) for path in paths(tree, request)] for request in range(size)]
    adjusted_BNV = torch.tensor(logits, dtype=torch.float64).log()
    verdict = walk(batch, tree, adjusted_BNV, None, replace(config, max_len=99))
    others, pairs = random.Random(5), []
    for tokens in verdict.accepted_tokens():
        tokens += others.choices(range(V), target(tuple(tokens))) if len(tokens) == 1 else []
        pairs.append(tokens[0] * V + tokens[1])
    joint = [p * q for first, p in enumerate(target(())) for q in target((first,))]
    return torch.tensor(pairs), torch.tensor(joint, dtype=torch.float64)


@pytest.mark.parametrize("name", SAMPLED)
def test_a_round_of_sampled_drafts_has_the_targets_distribution(name):
    """Drafts and uniforms have names as in production.

    Pearson's chi-square of two consecutive tokens over 2,500 rounds; false alarm 1e-6 each.
    """
    pairs, joint = emitted(name, SAMPLES)
    expected = SAMPLES * joint
    counts = torch.bincount(pairs, minlength=V * V).double()
    assert expected.min() > 3
    assert float(((counts - expected) ** 2 / expected).sum()) < chi2.isf(FALSE_ALARM, V * V - 1)
