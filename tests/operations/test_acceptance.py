import itertools
import math
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from specsim.core.uniforms import Stream, named_uniforms
from specsim.reference.acceptance import (
    Tree,
    block,
    greedy,
    gumbel,
    multi_round,
    recursive,
    rejection,
    residual,
    target_only,
    traversal,
    typical,
    without,
)
from specsim.reference.tree import links

LOWEST, HIGHEST = 2.0**-24, 1 - 2.0**-24  # the bounds of specsim.core.uniforms.named_uniforms
V = 4
MASS = 4  # enumerated probabilities are multiples of 1/4
ACCEPT_UNIFORMS = [(cell + 0.5) / MASS for cell in range(MASS)]  # one in every cell: no uniform lies on an edge
FINAL_UNIFORMS = [(cell + 0.5) / 12 for cell in range(12)]  # 12 divides by every mass that a residual can have


def make_tree(parents: list[int], tokens: list[int], depth_limit: int = 99) -> Tree:
    return Tree(tokens, parents, *links(parents), depth_limit)


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """List the tokens below the root of every node."""
    found = [()]
    for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
        found.append((*found[parent], token))
    return found


class Target:
    """A made-up target that gives V multiples of 1/MASS for every context of tokens below the root, always the same."""

    def __init__(self, seed: int):
        self.seed = seed

    def __call__(self, context: tuple[int, ...]) -> list[Fraction]:
        generator = np.random.default_rng([self.seed, *context, 99])
        return [Fraction(int(n), MASS) for n in generator.multinomial(MASS, generator.dirichlet([0.6] * V))]

    def rows(self, tree: Tree) -> torch.Tensor:
        return torch.tensor([[float(p) for p in self(path)] for path in paths(tree)], dtype=torch.float64)


def rounds(tree: Tree, prob_NV: torch.Tensor, threshold_single=1.0, threshold_acc=1.0):
    """List every outcome of a round over the grid of uniforms, all equally likely, as lists of tokens."""
    depth = max(map(len, paths(tree)))
    for accept in itertools.product(ACCEPT_UNIFORMS, repeat=depth):
        for final in FINAL_UNIFORMS:
            path, bonus = target_only(tree, prob_NV, [*accept, 0.5], final, threshold_single, threshold_acc)
            yield [*(tree.tokens[node] for node in path[1:]), bonus]


def joint_distribution(tree: Tree, target: Target, count: int, **thresholds) -> dict:
    """Compute the distribution of the first `count` tokens over enough rounds, the later ones without drafts."""
    outcomes = list(rounds(tree, target.rows(tree), **thresholds))
    chances = defaultdict(Fraction)
    for tokens in outcomes:
        for rest in itertools.product(range(V), repeat=max(0, count - len(tokens))):
            text = (*tokens[:count], *rest)
            chance = math.prod((target(text[:at])[text[at]] for at in range(len(tokens), count)), start=Fraction(1))
            chances[text] += chance / len(outcomes)
    return {text: chance for text, chance in chances.items() if chance}


def plain_distribution(target: Target, count: int) -> dict:
    chances = {}
    for text in itertools.product(range(V), repeat=count):
        chances[text] = math.prod(target(text[:at])[text[at]] for at in range(count))
    return {text: chance for text, chance in chances.items() if chance}


@st.composite
def draft_trees(draw, most_nodes: int = 7, most_depth: int = 2):
    """Draw a tree whose siblings have distinct tokens, in any order."""
    parents, tokens, depths = [-1], [0], [0]
    for node in range(1, draw(st.integers(1, most_nodes))):
        parent = draw(st.sampled_from([n for n in range(node) if depths[n] < most_depth]))
        taken = {token for token, other in zip(tokens, parents, strict=True) if other == parent}
        if len(taken) == V:
            break
        parents.append(parent)
        tokens.append(draw(st.sampled_from([token for token in range(V) if token not in taken])))
        depths.append(depths[parent] + 1)
    return make_tree(parents, tokens)


# Children 1 and 2 of the root, 3 and 0 below the first, 2 below the second.
FIVE = make_tree([-1, 0, 0, 1, 1, 2], [0, 1, 2, 3, 0, 2])


def test_children_and_path_tokens():
    assert [list(FIVE.children(node)) for node in range(6)] == [[1, 2], [3, 4], [5], [], [], []]
    assert [tuple(FIVE.path_tokens(node)) for node in range(6)] == [(0, *path) for path in paths(FIVE)]


def one_hot_rows(best: list[int]) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(best), V).double()


def test_greedy_breaks_ties_by_the_lower_token():
    assert greedy(FIVE, torch.zeros(6, V)) == ([0], 0)
    assert greedy(FIVE, torch.tensor([[0.0, 5.0, 5.0, 1.0]] * 6)) == ([0, 1], 1)


@given(draft_trees(most_nodes=12, most_depth=4), st.integers(0, 10**6))
def test_greedy_takes_the_longest_greedy_text_in_the_tree(tree, seed):
    logits_NV = torch.randn(len(tree.tokens), V, generator=torch.Generator().manual_seed(seed))
    node_of = {path: node for node, path in enumerate(paths(tree))}
    text = ()
    while text in node_of:
        text = (*text, int(logits_NV[node_of[text]].argmax()))
    path, bonus = greedy(tree, logits_NV)
    assert (paths(tree)[path[-1]], bonus) == (text[:-1], text[-1])
    assert path == [node_of[text[:length]] for length in range(len(text))]


@given(draft_trees(most_depth=3), st.integers(0, 10**6), st.sampled_from([LOWEST, 0.5, HIGHEST]), st.integers(0, 3))
def test_sampling_a_one_hot_distribution_is_greedy(tree, seed, uniform, depth_limit):
    tree = make_tree(tree.parents, tree.tokens, depth_limit)
    rows = one_hot_rows(torch.randint(V, (len(tree.tokens),), generator=torch.Generator().manual_seed(seed)).tolist())
    assert target_only(tree, rows, [uniform] * 4, uniform, 1.0, 1.0) == greedy(tree, rows)


@given(draft_trees(), st.integers(0, 10**6), st.integers(1, 3))
@settings(max_examples=60)
def test_text_has_exactly_the_targets_distribution(tree, seed, count):
    """Total variation is zero, in fractions: each uniform takes one value in every cell without a change."""
    target = Target(seed)
    assert joint_distribution(tree, target, count) == plain_distribution(target, count)


ONE, TWO, THREE = (make_tree([-1] + [0] * count, range(count + 1)) for count in (1, 2, 3))
DEEPER = make_tree([-1, 0, 0, 2], [0, 1, 2, 3])
QUARTERS = [  # tree, uniforms by depth, final uniform, threshold_acc, path and bonus; p is 1/4 of each token
    # A node has one uniform for all its children: its quarter decides which of three is accepted.
    *((THREE, [uniform], 0.1, 1.0, [0, child], 0) for child, uniform in enumerate(ACCEPT_UNIFORMS[:3], 1)),
    (THREE, ACCEPT_UNIFORMS[3:], 0.1, 1.0, [0], 0),
    # The uniform of a node is that of its depth.
    (DEEPER, [0.4, 0.2, 0.9], 0.6, 1.0, [0, 2, 3], 2),
    (DEEPER, [0.4, 0.3, 0.0], 0.9, 1.0, [0, 2], 2),
    # Equality accepts.
    (ONE, [0.25], 0.5, 1.0, [0, 1], 2),
    (ONE, [math.nextafter(0.25, 1)], 0.9, 1.0, [0], 3),
    # The bonus is drawn without the rejected children, and at full depth from the whole distribution.
    *((TWO, [HIGHEST], final, 1.0, [0], bonus) for final, bonus in ((LOWEST, 0), (0.49, 0), (0.51, 3), (HIGHEST, 3))),
    *((ONE, [LOWEST], final, 1.0, [0, 1], bonus) for final, bonus in ((LOWEST, 0), (0.3, 1), (0.6, 2), (HIGHEST, 3))),
    # threshold_acc scales the sum over siblings: the first two take the uniforms up to 1/3 and 2/3.
    (TWO, [0.32], 0.6, 0.75, [0, 1], 2),
    (TWO, [0.34], 0.6, 0.75, [0, 2], 2),
    (TWO, [0.66], 0.6, 0.75, [0, 2], 2),
    (TWO, [0.67], 0.6, 0.75, [0], 3),
]


@pytest.mark.parametrize(("tree", "accept", "final", "threshold_acc", "path", "bonus"), QUARTERS)
def test_target_only_by_hand(tree, accept, final, threshold_acc, path, bonus):
    flat = torch.full((4, V), 0.25, dtype=torch.float64)
    assert target_only(tree, flat, [*accept, 0.5], final, 1.0, threshold_acc) == (path, bonus)


@pytest.mark.parametrize("threshold", [1.0, 0.5, 0.0])
def test_no_uniform_accepts_a_draft_without_probability(threshold):
    tree = make_tree([-1, 0, 0], [0, 3, 2])
    prob_NV = torch.tensor([[0.5, 0.5, 0, 0]] * 3).double()
    for uniform, final in itertools.product([LOWEST, 0.5, HIGHEST], repeat=2):
        path, bonus = target_only(tree, prob_NV, [uniform, uniform], final, 1.0, threshold)
        assert path == [0]
        assert bonus in (0, 1)


@pytest.mark.parametrize(("final", "bonus"), [(0.1, 0), (0.2, 0), (0.3, 1), (HIGHEST, 1)])
def test_children_that_cover_the_mass_fall_back_to_the_target(final, bonus):
    """In float32 the children may cover the vocabulary and sum to less than the uniform."""
    tree = make_tree([-1, 0, 0], [0, 1, 0])
    prob_NV = torch.tensor([[0.25, 0.75 - 2.0**-23, 0, 0]] * 3)
    assert prob_NV[0].sum() < HIGHEST
    assert target_only(tree, prob_NV, [HIGHEST, 0.5], final, 1.0, 1.0) == ([0], bonus)


def test_distributions_are_not_changed_in_place():
    prob_NV = torch.full((6, V), 0.25)
    before = prob_NV.clone()
    target_only(FIVE, prob_NV, [HIGHEST] * 3, 0.5, 1.0, 1.0)
    greedy(FIVE, prob_NV)
    assert torch.equal(prob_NV, before)


@pytest.mark.parametrize(
    ("threshold_single", "threshold_acc", "weights", "expected"),
    [
        (1.0, 0.5, [1, 1, 1, 1], [Fraction(1, 6), Fraction(1, 2), Fraction(1, 6), Fraction(1, 6)]),
        (1.0, 0.5, [1, 2, 1, 0], [0, 1, 0, 0]),
        (1.0, 0.25, [2, 1, 1, 0], [0, 1, 0, 0]),
        (0.25, 1.0, [1, 1, 1, 1], [0, 1, 0, 0]),
        (0.5, 1.0, [1, 1, 1, 1], [Fraction(1, 4)] * 4),
        (0.5, 1.0, [1, 2, 1, 0], [0, 1, 0, 0]),
    ],
)
def test_thresholds_below_one_favour_the_draft(threshold_single, threshold_acc, weights, expected):
    """One child, token 1, is accepted with probability min(1, p / threshold_acc), surely where p ≥ threshold_single."""
    tree = make_tree([-1, 0], [0, 1])
    prob_NV = torch.tensor([weights] * 2).double() / MASS
    drawn = [tokens[0] for tokens in rounds(tree, prob_NV, threshold_single, threshold_acc)]
    assert [Fraction(drawn.count(token), len(drawn)) for token in range(V)] == expected


@given(draft_trees(), st.integers(0, 10**6), st.sampled_from([(1.0, 0.5), (0.5, 1.0), (0.5, 0.25), (1.0, 0.0)]))
@settings(max_examples=40)
def test_lower_thresholds_accept_wherever_higher_ones_do(tree, seed, thresholds):
    rows = Target(seed).rows(tree)

    def accepts_at_the_root(*thresholds):
        grid = [(cell + 0.5) / 64 for cell in range(64)]
        return {uniform for uniform in grid if len(target_only(tree, rows, [uniform] * 3, 0.5, *thresholds)[0]) > 1}

    assert accepts_at_the_root(1.0, 1.0) <= accepts_at_the_root(*thresholds)


@pytest.mark.parametrize("depth_limit", [-1, 0, 1, 2])
@given(tree=draft_trees(most_depth=3), seed=st.integers(0, 10**6))
@settings(max_examples=15)
def test_children_beyond_the_depth_limit_are_as_if_absent(depth_limit, tree, seed):
    depths = [len(path) for path in paths(tree)]
    kept = [node for node, depth in enumerate(depths) if depth <= max(0, depth_limit)]
    parents = [-1 if node == 0 else kept.index(tree.parents[node]) for node in kept]
    pruned = make_tree(parents, [tree.tokens[node] for node in kept])
    limited = make_tree(tree.parents, tree.tokens, depth_limit)
    rows = Target(seed).rows(tree)
    path, bonus = greedy(pruned, rows[kept])
    assert greedy(limited, rows) == ([kept[node] for node in path], bonus)
    for uniforms_and_final in itertools.product(ACCEPT_UNIFORMS, repeat=3):
        *accept, final = [*uniforms_and_final[:2], 0.4, uniforms_and_final[2]]
        path, bonus = target_only(pruned, rows[kept], [*accept, 0.5], final, 1.0, 1.0)
        assert target_only(limited, rows, [*accept, 0.5], final, 1.0, 1.0) == ([kept[node] for node in path], bonus)


def test_first_token_with_the_packages_uniforms():
    """Chi-square of n = 20 000 requests.

    The 24-bit grid moves a probability by at most 2⁻²³; false alarm 10⁻⁶.
    """
    tree, prob_V = make_tree([-1, 0, 0], [0, 2, 1]), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    requests = torch.arange(20_000)
    accept = named_uniforms(5, requests, Stream.ACCEPT, 17, 0).tolist()
    final = named_uniforms(5, requests, Stream.FINAL, 17, 0).tolist()
    counts = [0] * V
    for uniform, last in zip(accept, final, strict=True):
        path, bonus = target_only(tree, prob_V.expand(3, V), [uniform, 0.5], last, 1.0, 1.0)
        counts[tree.tokens[path[1]] if len(path) > 1 else bonus] += 1
    expected = 20_000 * prob_V.numpy()
    assert ((np.array(counts) - expected) ** 2 / expected).sum() < chi2.isf(1e-6, V - 1)


def chain(*drafts: int, depth_limit: int = 99) -> Tree:
    return make_tree([*range(-1, len(drafts))], [0, *drafts], depth_limit)


def rows_of(*weights: list[float]) -> torch.Tensor:
    return torch.tensor(weights, dtype=torch.float64)


@pytest.mark.parametrize(
    ("accept", "final", "path", "bonus"),
    [
        ([0.49, 0.9], 0.6, [0, 1, 2], 2),
        ([0.49, 0.9], 0.4, [0, 1, 2], 1),
        ([0.5, 0.1], LOWEST, [0], 1),
        ([HIGHEST, 0.1], 0.74, [0], 1),
        ([HIGHEST, 0.1], 0.76, [0], 2),
    ],
)
def test_rejection_accepts_below_the_ratio(accept, final, path, bonus):
    """p(0) / q(0) = 1/2, p(1) / q(1) > 1.

    Without the first draft the residual is 3/8 of token 1 and 1/8 of token 2.
    """
    prob_NV = rows_of([0.25, 0.5, 0.25], [0.25, 0.75, 0.0], [0.0, 0.5, 0.5])
    draft_prob_SV = rows_of([0.5, 0.125, 0.125], [0.25, 0.5, 0.25])
    assert rejection(chain(0, 1), prob_NV, draft_prob_SV, accept, final) == (path, bonus)


@pytest.mark.parametrize("verifier", [rejection, block, multi_round, traversal, recursive])
def test_a_draft_that_was_not_drawn_is_rejected(verifier):
    """q is 0, as where the drafter's logits are NaN, so that the residual is p."""
    prob_NV = rows_of([0.25, 0.5, 0.25], [0.25, 0.75, 0.0])
    found = verifier(chain(0), prob_NV, rows_of([0.0] * 3, [0.0] * 3), [LOWEST] * 2, 0.76)
    assert found == ([0], 2)


@pytest.mark.parametrize(
    ("drafts", "accept", "path", "bonus"),
    [
        ((0, 0), [LOWEST, 0.24], [0, 1, 2], None),
        ((0, 0), [LOWEST, 0.26], [0], 1),
        ((0, 1), [HIGHEST, HIGHEST], [0, 1, 2], None),
        ((1, 0), [HIGHEST, 0.49], [0, 1, 2], None),
        ((1, 0), [HIGHEST, 0.51], [0, 1], 1),
        ((1, 1), [HIGHEST, HIGHEST], [0, 1, 2], None),
    ],
)
def test_block_verification_by_hand(drafts, accept, path, bonus):
    """p = (1/3, 2/3) and q = (2/3, 1/3).

    w_1 is 1/2 after token 0 (r_1 = 0), 1 after token 1 (r_1 = 1/3). w_2 doubles or halves it.
    """
    prob_NV, draft_prob_SV = rows_of(*[[1 / 3, 2 / 3]] * 3), rows_of(*[[2 / 3, 1 / 3]] * 2)
    for final in (LOWEST, 0.3, 0.4, HIGHEST):
        expected = bonus if bonus is not None else int(final > 1 / 3)
        assert block(chain(*drafts), prob_NV, draft_prob_SV, accept, final) == (path, expected)


LANES = make_tree([-1, 0, 0, 1, 2], [0, 1, 1, 0, 2])


@pytest.mark.parametrize(
    ("accept", "final", "path", "bonus"),
    [
        ({1: 0.4, 3: 0.1}, 0.5, [0, 1, 3], 3),
        ({1: 0.4, 3: 0.9}, 0.5, [0, 1], 1),
        ({1: 0.6, 2: LOWEST}, 0.27, [0], 0),
        ({1: 0.6, 2: LOWEST}, 0.29, [0], 3),
    ],
)
def test_multi_round_tries_each_sibling_with_its_own_uniform(accept, final, path, bonus):
    """Both children of the root hold token 1, with p = 3/8 and q = 3/4.

    The residual is 1/3 of token 0 and 2/3 of token 3 after one rejection, 5/18 and 13/18 after the second.
    """
    prob_NV = rows_of([0.25, 0.375, 0, 0.375], [0.25, 0.75, 0, 0], [0.25] * 4, [0, 0, 0, 1], [0.25] * 4)
    draft_prob_NV = rows_of([0.125, 0.75, 0, 0.125], [0.5, 0.5, 0, 0], *[[0.25] * 4] * 3)
    uniforms_N = [accept.get(node, math.nan) for node in range(5)]
    assert multi_round(LANES, prob_NV, draft_prob_NV, uniforms_N, final) == (path, bonus)


def test_multi_round_normalises_the_residual_distribution():
    """The residual without token 0 has a quarter of tokens 1 and 2 each.

    Normalised that is a half, which equals q(2).
    """
    tree, prob_NV = make_tree([-1, 0, 0], [0, 0, 2]), rows_of(*[[0, 0.25, 0.75, 0]] * 3)
    draft_prob_NV = rows_of(*[[0.5, 0, 0.5, 0]] * 3)
    assert multi_round(tree, prob_NV, draft_prob_NV, [math.nan, LOWEST, HIGHEST], 0.2) == ([0, 2], 1)


@pytest.mark.parametrize(
    ("accept", "path", "bonus"),
    [({1: 0.49}, [0, 1], 3), ({1: 0.51, 2: 0.66}, [0, 2], 3), ({1: 0.51, 2: 0.67}, [0], 0)],
)
def test_recursive_rejection_removes_the_token_from_q(accept, path, bonus):
    """p = (3, 3, 2, 0) / 8 and q = (1, 2, 4, 1) / 8, so that p(2) / q(2) = 1/2.

    Without token 2 p = (2, 1, 0, 0) / 3 and q = (1, 2, 0, 1) / 4. Without token 1 only token 0 remains.
    """
    tree = make_tree([-1, 0, 0], [0, 2, 1])
    prob_NV = rows_of([0.375, 0.375, 0.25, 0], *[[0, 0, 0, 1]] * 2)
    draft_prob_NV = rows_of([0.125, 0.25, 0.5, 0.125], *[[0.25] * 4] * 2)
    uniforms_N = [accept.get(node, math.nan) for node in range(3)]
    for final in (LOWEST, HIGHEST):
        assert recursive(tree, prob_NV, draft_prob_NV, uniforms_N, final) == (path, bonus)


def test_a_sibling_without_mass_in_q_is_rejected():
    """q has two tokens for four siblings; the last two repeat them, and the residual stays (0, 0, 1)."""
    tree = make_tree([-1, 0, 0, 0, 0], [0, 0, 1, 0, 1])
    prob_NV, draft_prob_NV = rows_of(*[[0.25, 0.25, 0.5]] * 5), rows_of(*[[0.5, 0.5, 0.0]] * 5)
    uniforms_N = [math.nan, 0.6, HIGHEST, LOWEST, LOWEST]
    assert recursive(tree, prob_NV, draft_prob_NV, uniforms_N, LOWEST) == ([0], 2)
    assert without(torch.tensor([0.5, 0.25, 0.25]), 0).tolist() == [0, 0.5, 0.5]
    assert without(torch.tensor([0.0, 1.0, 0.0]), 1).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("accept", "path", "bonus"),
    [
        ({3: 0.24}, [0, 1, 3], None),
        ({3: 0.26, 1: LOWEST, 4: 0.49}, [0, 2, 4], None),
        ({3: 0.26, 1: LOWEST, 4: 0.51, 2: HIGHEST}, [0, 2], 1),
    ],
)
def test_traversal_goes_from_leaves_to_the_root(accept, path, bonus):
    """p = (1/3, 2/3) and q = (2/3, 1/3) everywhere; lanes (0, 0) and (1, 0).

    The first leaf has w = 1/4, which leaves its parent nothing. Then p = (0, 1) at the root, so that node 2 has w = 1
    and its leaf 1/2; without the leaf it has p = (0, 1) and still w = 1.
    """
    tree = make_tree([-1, 0, 0, 1, 2], [0, 0, 1, 0, 0])
    prob_NV, draft_prob_NV = rows_of(*[[1 / 3, 2 / 3]] * 5), rows_of(*[[2 / 3, 1 / 3]] * 5)
    uniforms_N = [accept.get(node, math.nan) for node in range(5)]
    for final in (LOWEST, 0.3, 0.4, HIGHEST):
        expected = bonus if bonus is not None else int(final > 1 / 3)
        assert traversal(tree, prob_NV, draft_prob_NV, uniforms_N, final) == (path, expected)


DYADIC = [[8, 0, 0], [0, 3, 5], [2, 2, 4], [1, 6, 1], [4, 4, 0], [3, 3, 2]]  # eighths


UNIFORMS = st.integers(0, 63).map(lambda cell: (2 * cell + 1) / 128)


@given(st.sampled_from(DYADIC), st.sampled_from(DYADIC), st.integers(0, 2), UNIFORMS, UNIFORMS)
def test_one_draft_is_verified_alike_by_five_verifiers(prob, draft_prob, draft, accept, final):
    prob_NV, draft_prob_NV = rows_of(prob, [2, 1, 5]) / 8, rows_of(draft_prob, draft_prob) / 8
    if draft_prob_NV[0, draft] > 0:
        expected = rejection(chain(draft), prob_NV, draft_prob_NV, [accept], final)
        assert block(chain(draft), prob_NV, draft_prob_NV, [accept], final) == expected
        for verifier in (multi_round, traversal, recursive):
            assert verifier(chain(draft), prob_NV, draft_prob_NV, [math.nan, accept], final) == expected


@given(
    st.lists(st.sampled_from(DYADIC), min_size=8, max_size=8),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
    st.lists(UNIFORMS, min_size=4, max_size=4),
    st.integers(0, 3),
)
def test_a_chain_of_lanes_is_verified_as_a_chain(weights, drafts, uniforms, depth_limit):
    """Traversal is block verification then, and both other verifiers of siblings are rejection."""
    prob_NV, draft_prob_NV = rows_of(*weights[:4]) / 8, (rows_of(*weights[4:]) + 1) / 11
    tree, (*accept, final) = chain(*drafts, depth_limit=depth_limit), uniforms
    for lanes, of_chain in ((traversal, block), (multi_round, rejection), (recursive, rejection)):
        expected = of_chain(tree, prob_NV, draft_prob_NV, accept, final)
        assert lanes(tree, prob_NV, draft_prob_NV, [math.nan, *accept], final) == expected


@given(st.lists(st.sampled_from(DYADIC), min_size=4, max_size=4), st.lists(UNIFORMS, min_size=4, max_size=4))
def test_drafts_from_the_targets_distribution_are_all_accepted(weights, accept):
    prob_NV = rows_of(*weights) / 8
    drafts = [max(range(3), key=row.__getitem__) for row in weights[:3]]
    whole = [0, 1, 2, 3]
    assert rejection(chain(*drafts), prob_NV, prob_NV[:3], accept, 0.5)[0] == whole
    assert block(chain(*drafts), prob_NV, prob_NV[:3], accept, 0.5)[0] == whole
    for verifier in (multi_round, traversal, recursive):
        assert verifier(chain(*drafts), prob_NV, prob_NV, accept, 0.5)[0] == whole


@pytest.mark.parametrize("uniform", [LOWEST, 0.5, HIGHEST])
def test_a_draft_of_target_probability_0_is_never_accepted(uniform):
    prob_NV, draft_prob_NV = rows_of(*[[0, 0.5, 0.5]] * 3), rows_of(*[[0.5, 0.25, 0.25]] * 3)
    for final in (LOWEST, HIGHEST):
        for verifier in (rejection, block, multi_round, traversal, recursive):
            path, bonus = verifier(chain(0, 1), prob_NV, draft_prob_NV, [uniform] * 3, final)
            assert path == [0]
            assert bonus in (1, 2)


@given(
    st.sampled_from([rejection, block, multi_round, traversal, recursive]),
    st.lists(st.sampled_from(DYADIC), min_size=8, max_size=8),
    st.lists(st.integers(0, 2), min_size=3, max_size=3),
    st.lists(UNIFORMS, min_size=5, max_size=5),
    st.integers(-1, 3),
)
def test_a_chain_ends_at_the_depth_limit_as_if_it_were_no_longer(verifier, weights, drafts, uniforms, depth_limit):
    prob_NV, draft_prob_NV = rows_of(*weights[:4]) / 8, (rows_of(*weights[4:]) + 1) / 11
    *accept, final = uniforms
    limited = verifier(chain(*drafts, depth_limit=depth_limit), prob_NV, draft_prob_NV, accept, final)
    kept = max(depth_limit, 0)
    shorter = chain(*drafts[:kept])
    assert limited == verifier(shorter, prob_NV[: kept + 1], draft_prob_NV[: kept + 1], accept, final)


def test_an_empty_residual_is_the_target_itself():
    prob_V = torch.tensor([0.25, 0.75])
    assert residual(prob_V, torch.tensor([0.25, 0.75])) is prob_V
    assert residual(prob_V, torch.tensor([0.5, 0.5])).tolist() == [0.0, 0.25]


@pytest.mark.parametrize(
    ("prob", "is_accepted"),
    [
        ([0.25, 0.25, 0.25, 0.25], True),  # entropy log 4: δ exp(-H) = 0.075
        ([0.0, 0.08, 0.92, 0.0], False),  # δ exp(-H) = 0.227: ε = 0.09 is less
        ([0.0, 0.1, 0.9, 0.0], True),
        ([0.0, 0.0, 1.0, 0.0], False),
    ],
)
def test_typical_accepts_above_the_lesser_of_two_thresholds(prob, is_accepted):
    path, bonus = typical(chain(1), rows_of(prob, [0, 0, 0, 1]), 0.5, 0.09, 0.3)
    assert (path, bonus) == (([0, 1], 3) if is_accepted else ([0], 2 if prob[2] > 0.5 else 1))


def test_typical_needs_more_than_its_threshold():
    """The uniform distribution has δ exp(-H) = δ / 4.

    For δ = 1 that equals p, and so does ε = 1/4.
    """
    flat = torch.full((2, V), 0.25, dtype=torch.float64)
    assert typical(chain(1), flat, 0.5, 0.25, 9.0)[0] == [0]
    assert typical(chain(1), flat, 0.5, 0.2499, 9.0)[0] == [0, 1]
    assert typical(chain(1), flat, 0.5, 9.0, 0.999)[0] == [0, 1]
    assert typical(chain(1), flat, 0.5, 9.0, 1.001)[0] == [0]


def test_typical_takes_the_longest_then_the_likeliest_path():
    prob_NV = torch.full((6, V), 0.25, dtype=torch.float64)
    assert typical(FIVE, prob_NV, 0.9, 0.09, 0.3) == ([0, 1, 3], 3)
    prob_NV[2] = torch.tensor([0, 0, 1.0, 0])
    assert typical(FIVE, prob_NV, 0.9, 0.09, 0.3)[0] == [0, 2, 5]
    prob_NV[2] = torch.tensor([1.0, 0, 0, 0])
    prob_NV[0] = torch.tensor([0.0, 0.2, 0.8, 0])
    assert typical(FIVE, prob_NV, 0.9, 0.09, 0.3)[0] == [0, 1, 3]
    assert typical(make_tree(FIVE.parents, FIVE.tokens, 1), prob_NV, 0.9, 0.09, 0.3) == ([0, 2], 0)
    assert typical(make_tree(FIVE.parents, FIVE.tokens, 0), prob_NV, 0.9, 0.09, 0.3) == ([0], 2)


def test_gumbel_accepts_drafts_that_are_the_noisy_argmax():
    prob_NV = rows_of([0.5, 0.5, 0, 0], [0.25, 0.25, 0.5, 0], [0, 0, 0.5, 0.5])
    noise_WV = rows_of([0, 0.1, 99, 99], [3, 0, 1, 99], [99, 99, 0, 0])
    assert gumbel(chain(1, 0), prob_NV, noise_WV) == ([0, 1, 2], 2)
    assert gumbel(chain(1, 1), prob_NV, noise_WV) == ([0, 1], 0)
    assert gumbel(chain(0, 0), prob_NV, noise_WV) == ([0], 1)
    assert gumbel(chain(1, 0, depth_limit=1), prob_NV, noise_WV) == ([0, 1], 0)


def test_gumbel_noise_is_that_of_the_position_on_every_branch():
    prob_NV, noise_WV = torch.full((6, V), 0.25, dtype=torch.float64), torch.zeros(3, V)
    noise_WV[0, 2], noise_WV[1, 2], noise_WV[2, 3] = 1, 1, 1
    assert gumbel(FIVE, prob_NV, noise_WV) == ([0, 2, 5], 3)


@given(st.integers(0, 10**6), st.integers(1, 4))
def test_drafts_of_equal_distributions_and_noise_are_accepted(seed, num_drafts):
    generator = torch.Generator().manual_seed(seed)
    prob_NV = torch.softmax(torch.randn(num_drafts + 1, V, generator=generator, dtype=torch.float64), -1)
    noise_WV = -torch.empty_like(prob_NV).exponential_(generator=generator).log()
    drafts = (prob_NV.log() + noise_WV).argmax(-1).tolist()
    assert gumbel(chain(*drafts[:-1]), prob_NV, noise_WV) == ([*range(num_drafts + 1)], drafts[-1])
