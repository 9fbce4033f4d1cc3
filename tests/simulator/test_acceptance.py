"""Acceptance distributions: means and spreads on equal uniforms, compared with closed forms.

The bound for a mean over n rounds is 5 standard errors: one false alarm in 1.7 million.
"""

import numpy as np
import pytest

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import (
    Callback,
    DraftedRounds,
    Mixture,
    Option,
    PerPosition,
    RecordedAcceptance,
    accept_length,
    iid,
    iid_of_length,
    steady,
    walk,
)
from specsim.simulator.rank_by_depth import best_tree, rank_by_depth
from specsim.simulator.uniforms import UniformStream, keys, named_uniforms

ROUNDS = 40_000


def rounds(num_requests: int, per_request: int, seed: int = 0) -> DraftedRounds:
    """Rounds 0, 1, ... of every request, each at a position of its own."""
    ids = np.repeat(np.arange(num_requests), per_request)
    indices = np.tile(np.arange(per_request), num_requests)
    return DraftedRounds(ids, indices, 3 * indices, named_uniforms(keys(seed, UniformStream.ROUND, ids), 3 * indices))


def measured(distribution, drawn: DraftedRounds) -> np.ndarray:
    counts = distribution.accepted(drawn)
    return np.array([(counts >= step).mean() for step in range(1, distribution.num_steps + 1)])


def test_uniforms_are_uniform_and_named():
    drawn = named_uniforms(keys(1, UniformStream.ROUND, np.arange(200))[:, None], np.arange(200))
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts, _ = np.histogram(drawn, 100, (0, 1))
    # Chi-square of 99 degrees of freedom: beyond 171 with probability 1e-5, below 51 with 1e-5.
    assert 51 < ((counts - 400) ** 2 / 400).sum() < 171
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 5 / 200**0.5
    assert (drawn[7, 3:5] == named_uniforms(keys(1, UniformStream.ROUND, np.array([7])), np.array([3, 4]))).all()
    assert not (drawn == named_uniforms(keys(1, UniformStream.PHASE, np.arange(200))[:, None], np.arange(200))).any()
    assert not (drawn == named_uniforms(keys(2, UniformStream.ROUND, np.arange(200))[:, None], np.arange(200))).any()


def test_iid_has_the_textbook_mean():
    distribution = iid(0.7, 5)
    assert accept_length(distribution) == pytest.approx((1 - 0.7**6) / (1 - 0.7))
    assert np.abs(measured(distribution, rounds(ROUNDS, 1)) - distribution.rates()).max() < 5 * 0.5 / ROUNDS**0.5


@pytest.mark.parametrize("length", [1, 1.5, 3.78, 7.999, 8])
def test_iid_of_length_has_that_length(length):
    assert accept_length(iid_of_length(length, 7)) == pytest.approx(length, abs=1e-9)
    assert accept_length(steady(length, 7)) == pytest.approx(length, abs=1e-12)


def test_equal_means_have_different_tails():
    """theory: accept length 3.78 of 7 drafts has standard deviation 0.41 at least variance, 2.48 if i.i.d."""
    drawn = rounds(200, 200)
    assert np.std(steady(3.78, 7).accepted(drawn)) == pytest.approx(0.41, abs=0.01)
    assert np.std(iid_of_length(3.78, 7).accepted(drawn)) == pytest.approx(2.48, abs=0.04)


def test_least_variance_is_within_one_round_of_its_rates():
    distribution = PerPosition((0.73, 0.52, 0.35), "minimum-variance", seed=3)
    counts = distribution.accepted(rounds(50, 300)).reshape(50, 300)
    for position, rate in enumerate(distribution.by_position):
        so_far = np.cumsum(counts > position, axis=1)
        assert np.abs(so_far - rate * np.arange(1, 301)).max() < position + 1


def test_shorter_chains_meet_the_same_uniforms():
    drawn, rates = rounds(500, 4), (0.8, 0.5, 0.3, 0.1)
    for schedule in ("independent", "minimum-variance"):
        long, short = (PerPosition(rates[:steps], schedule).accepted(drawn) for steps in (4, 2))
        assert (np.minimum(long, 2) == short).all()


def test_mixture_keeps_a_request_in_its_kind_and_weighs_rounds():
    distribution = Mixture((iid(0.0, 3), iid(1.0, 3)), (1.0, 1.0))
    counts = distribution.accepted(rounds(2000, 5)).reshape(2000, 5)
    assert set(counts.ravel()) == {0, 3}
    assert (counts == counts[:, :1]).all()
    assert abs((counts[:, 0] == 3).mean() - 0.5) < 5 * 0.5 / 2000**0.5
    # Of equally many tokens the first kind makes 4 rounds where the second makes 1.
    assert distribution.rates() == pytest.approx([0.2] * 3)


def test_recorded_rounds_are_played_back():
    distribution = RecordedAcceptance((np.array([0, 2, 1]), np.array([3])), 3)
    drawn = DraftedRounds(np.array([0, 0, 1, 2, 3]), np.array([1, 4, 9, 2, 0]), np.zeros(5, int), np.zeros(5))
    assert distribution.accepted(drawn).tolist() == [2, 2, 3, 1, 3]
    assert distribution.rates() == pytest.approx([3 / 4, 2 / 4, 1 / 4])


def test_recorded_positions_are_walked():
    by_position = np.array([2, 9, 9, 0, 1, 9, 0])
    assert walk(by_position).tolist() == [2, 0, 1, 0]
    assert walk(by_position, 1).tolist() == [1, 1, 1, 0]
    distribution = RecordedAcceptance((by_position,), 9, by="position")
    assert accept_length(distribution) == pytest.approx(1 + 3 / 4)
    drawn = DraftedRounds(np.zeros(3, int), np.zeros(3, int), np.array([0, 3, 11]), np.zeros(3))
    assert distribution.accepted(drawn).tolist() == [2, 0, 1]


def test_a_shorter_chain_has_the_rates_of_its_own_rounds():
    assert PerPosition((0.8, 0.5, 0.3)).rates(2).tolist() == [0.8, 0.5]
    # Of equally many tokens the first kind makes 2 rounds where the second makes 1.
    assert Mixture((iid(0.0, 3), iid(1.0, 3)), (1.0, 1.0)).rates(1) == pytest.approx([1 / 3])
    by_round, by_position = (
        RecordedAcceptance((np.array([0, 2, 1]),), 2),
        RecordedAcceptance((np.array([2, 2, 2, 0]),), 2, by="position"),
    )
    assert by_round.rates(1) == pytest.approx([2 / 3])
    assert by_position.rates(1) == pytest.approx([1])  # from positions 0 and 2, where two drafts lead to 3
    for distribution in (by_round, by_position):
        assert accept_length(distribution, 0) == 1


def test_a_callback_decides_and_is_checked():
    drawn = rounds(3, 1)
    assert Callback(lambda rounds: rounds.request_ids % 2, 1).accepted(drawn).tolist() == [0, 1, 0]
    for counts in ([0, 1], [0, 1, 2], [0.0, 1.0, 0.0]):
        with pytest.raises(InputError, check=lambda error: error.name == "function"):
            Callback(lambda _, counts=counts: counts, 1).accepted(drawn)


def test_only_a_closed_form_has_an_accept_length_in_advance():
    with pytest.raises(InputError, check=lambda error: error.name == "acceptance"):
        _ = Option(SpecConfig(1, 1, 2), Callback(lambda rounds: rounds.indices, 1)).accept_length


SHARES = ((0.6, 0.2, 0.1), (0.5, 0.25, 0.1), (0.4, 0.3, 0.2))


def test_best_chain_by_rank_is_the_product_of_first_ranks():
    distribution = rank_by_depth(SHARES, SpecConfig(1, 3, 4))
    assert distribution.by_position == pytest.approx((0.6, 0.3, 0.12))


def test_best_tree_by_rank_is_the_best_of_all_trees():
    config = SpecConfig(3, 3, 6)
    shares = SHARES
    every = [((), 1.0)]
    for depth in range(3):
        every += [((*path, rank), 0) for path, _ in every if len(path) == depth for rank in range(3)]
    score = {path: np.prod([shares[depth][rank] for depth, rank in enumerate(path)]) for path, _ in every if path}
    best = sum(sorted(score.values())[-5:])
    assert sum(rank_by_depth(shares, config).by_position) == pytest.approx(best)
    tree = best_tree(shares, config)
    assert tree.parents == (0, 0, 1, 1, 3)
    assert tree.ranks == (0, 1, 0, 1, 0)
    assert tree.depths == (1, 1, 2, 2, 3)


def test_few_lanes_cost_acceptance_and_more_nodes_never_do():
    flat = ((0.3, 0.28, 0.26),) * 3
    lengths = [accept_length(rank_by_depth(flat, SpecConfig(k, 3, 7))) for k in (2, 3)]
    assert lengths[0] < lengths[1]
    sizes = [accept_length(rank_by_depth(flat, SpecConfig(3, 3, n))) for n in range(2, 22)]
    assert (np.diff(sizes) >= 0).all()
    assert sizes[-1] > sizes[0]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: PerPosition((0.5, 0.6)), "by_position", (0.5, 0.6)),
        (lambda: PerPosition((1.1,)), "by_position", 1.1),
        (lambda: PerPosition((-float("inf"),)), "by_position", (-float("inf"),)),
        (lambda: PerPosition("0.5"), "by_position", "0.5"),
        (lambda: PerPosition((0.5,), "sometimes"), "schedule", "sometimes"),
        (lambda: iid(-0.1, 3), "rate", -0.1),
        (lambda: iid(True, 3), "rate", True),
        (lambda: iid(0.5, -1), "num_steps", -1),
        (lambda: iid_of_length(4.5, 3), "accept_length", 4.5),
        (lambda: steady(0.5, 3), "accept_length", 0.5),
        (lambda: Option(SpecConfig(1, 3, 4), iid(0.5, 2)), "acceptance", 2),
        (lambda: Option(SpecConfig(1, 3, 4), SpecConfig()), "acceptance", SpecConfig),
        (lambda: Mixture((iid(0.5, 2),), (-1,)), "weights", -1),
        (lambda: RecordedAcceptance((np.array([0, 4]),), 3), "counts", 4),
        (lambda: RecordedAcceptance((np.array([], int),), 3), "counts", "1 requests"),
        (lambda: rank_by_depth(((0.7, 0.6),), SpecConfig(2, 1, 2)), "shares", (0.7, 0.6)),
        (lambda: rank_by_depth(((0.7,),), SpecConfig(2, 1, 2)), "shares", ((0.7,),)),
    ],
)
def test_impossible_acceptance_is_refused(make, name, value):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        make()


def test_parts_of_a_mixture_have_equally_many_steps():
    with pytest.raises(InputError, check=lambda error: error.name == "parts"):
        Mixture((iid(0.5, 2), iid(0.5, 3)), (1, 1))


def test_a_rate_that_is_no_number_is_refused_by_its_bounds():
    with pytest.raises(InputError, check=lambda error: error.name == "by_position"):
        PerPosition((float("nan"),))
