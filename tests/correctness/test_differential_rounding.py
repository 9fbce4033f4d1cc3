"""The differential test attributes differences to rounding exactly as far as rounding can explain them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import specsim.core.uniforms as drawing
import specsim.correctness.differential.grid_run as running
from specsim import SamplingParams, SpecConfig
from specsim.core.phases import (
    Batch,
    Sampling,
)
from specsim.core.uniforms import final_uniforms
from specsim.correctness.differential import check
from specsim.correctness.differential.cell import SAMPLINGS, cell_of
from specsim.correctness.differential.comparison import (
    FLOAT32_EPS,
    FieldChecks,
    Mismatch,
    Tally,
    Trio,
    budget,
    log_prob_budget,
)
from specsim.correctness.differential.distribution import (
    LEAST,
    MOST,
    ReportedWalk,
    RowDistribution,
    compare_accepted,
    rounding,
)
from specsim.correctness.differential.grid_run import perturbation_budgets
from specsim.correctness.differential.pairs import make_pair, perturbed
from specsim.correctness.differential.ranking import Ranking, log_scores
from specsim.reference.acceptance import Tree

ONE = Sampling.of([SAMPLINGS["warm"]], 8)


def comparison():
    return FieldChecks(Tally(), FLOAT32_EPS)


def rank(fast, exact_V, reference_V=None, noise=0.5, exact=None):
    exact = exact or torch.sort(exact_V, descending=True, stable=True).indices[: len(fast)].tolist()
    ranking = Ranking(exact_V if reference_V is None else reference_V, exact_V, noise)
    check = comparison()
    return ranking.compare(check, "field", Trio(exact, exact, fast)), check.tally


def test_the_budget_is_measured_between_the_references():
    reference, exact = torch.tensor([1.0, 2.5]), torch.tensor([1.25, 2.0], dtype=torch.float64)
    assert budget(reference, exact, 0.0) == 2.0
    assert budget(reference, exact, 0.125) == 2.0 + 16 * 0.125 * 2
    assert budget(reference, exact, 0.125, magnitude=8.0) == 2.0 + 16 * 0.125 * 8
    assert budget(torch.empty(0), torch.empty(0), 1.0) == 0
    assert budget(torch.tensor([-torch.inf]), torch.tensor([-torch.inf]), 1.0) == 0


def test_the_budget_of_a_log_probability_is_that_of_all_logits():
    """The largest error decides, even if the compared probabilities are right."""
    reference, exact = torch.tensor([[1.0, 2.0, 9.5]]), torch.tensor([[1.0, 2.0, 9.0]], dtype=torch.float64)
    assert log_prob_budget(reference, exact, 0.0) == 4.0


def test_two_values_change_places_only_within_twice_their_noise():
    assert not rank([1, 0], torch.tensor([1.0, 1.0 - 0.999, -9.0], dtype=torch.float64))[0]
    with pytest.raises(Mismatch):
        rank([1, 0], torch.tensor([1.0, 1.0 - 1.001, -9.0], dtype=torch.float64))


@pytest.mark.parametrize(
    ("fast", "error"), [([1, 0], Mismatch), ([1, 2], Mismatch), ([0, 2], Mismatch), ([0, 0], Mismatch), ([0, 1], None)]
)
def test_values_equal_in_both_precisions_go_by_index(fast, error):
    """Ids 0, 1 and 2 are tied; the noise would allow any order of them."""
    tied = torch.tensor([1.0, 1.0, 1.0, -9.0], dtype=torch.float64)
    if error is None:
        is_same, tally = rank(fast, tied)
        assert is_same
        assert tally.coverage["ties"] == 1
    else:
        with pytest.raises(error):
            rank(fast, tied)


def test_values_equal_in_only_one_precision_may_swap():
    tied, apart = torch.tensor([1.0, 1.0, -9.0], dtype=torch.float64), torch.tensor([1.0, 1.1, -9.0])
    assert not rank([1, 0], tied, apart)[0]


def test_a_shifted_ranking_is_not_taken_for_a_broken_tie():
    values = torch.tensor([1.0, 0.9, 0.9, -9.0], dtype=torch.float64)
    assert not rank([1, 2, 0], values, exact=[0, 1, 2])[0]


@pytest.mark.parametrize(
    ("known", "gap", "token", "error"),
    [(True, 1e-9, 1, Mismatch), (False, 1e-9, 1, None), (False, 1e-3, 1, Mismatch), (True, 0.0, 1, Mismatch)],
)
def test_greedy_choices_from_known_logits_are_exact(known, gap, token, error):
    adjusted_V = torch.tensor([2.0, 2.0 - gap, 0.0], dtype=torch.float64)
    distribution = RowDistribution(adjusted_V, ONE, rounding(adjusted_V), known)
    distribution.compare_argmax("field", 0, 0)
    if error is None:
        distribution.compare_argmax("field", token, 0)
    else:
        with pytest.raises(error):
            distribution.compare_argmax("field", token, 0)


@pytest.mark.parametrize(("beyond", "fits"), [(0.9, True), (1.1, False)])
def test_a_draw_may_miss_its_share_by_the_slack(beyond, fits):
    distribution = RowDistribution(torch.zeros(8, dtype=torch.float64), ONE, 1e-6)
    uniform = 0.125 + beyond * distribution.slack
    assert distribution.compare_draw("field", distribution.prob(), uniform, 1, 0)
    if fits:
        assert distribution.compare_draw("field", distribution.prob(), uniform, 0, 0)
    else:
        with pytest.raises(Mismatch):
            distribution.compare_draw("field", distribution.prob(), uniform, 0, 0)


def test_a_token_without_mass_is_never_drawn():
    distribution = RowDistribution(torch.zeros(8, dtype=torch.float64), ONE, 1e-6)
    with pytest.raises(Mismatch):
        distribution.compare_draw("field", distribution.prob().index_fill(0, torch.tensor([3]), 0.0), 0.375, 3, 0)


FILTERS = {
    "top_k": (dict(top_k=2), [3.0, 2.0, 2.0 - 1e-9, 0.0], [3.0, 2.0, 1.0, 0.0]),
    "top_p": (dict(top_p=0.5), [2.0, 1.0, 1.0, -50.0], [2.0, 1.0, 0.0, -50.0]),
    "min_p": (dict(min_p=0.5), [0.0, -0.6931471805599453, -3.0, -3.0], [0.0, -0.5, -3.0, -3.0]),
}


@pytest.mark.parametrize(("params", "close", "clear"), FILTERS.values(), ids=FILTERS)
def test_a_filters_edge_within_noise_makes_a_draw_uncertain(params, close, clear):
    sampling = Sampling.of([replace(SAMPLINGS["warm"], **params)], 4)
    if "top_p" in params:  # a token before which exactly top_p stands
        close = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().tolist()
    fragile, sound = (RowDistribution(torch.tensor(v, dtype=torch.float64), sampling, 1e-6) for v in (close, clear))
    assert fragile.is_fragile()
    assert not sound.is_fragile()
    assert not fragile.deny("field", 0, 3, 0)
    with pytest.raises(Mismatch):
        sound.deny("field", 0, 3, 0)


def test_small_scores_are_compared_as_closely_as_large_ones():
    """Scores are compared as logarithms, so equal relative errors of 1e-9 and 1 count equally."""
    right = torch.tensor([1.0, 1e-9])
    wrong = torch.tensor([1.0, 1.01e-9])
    with pytest.raises(Mismatch):
        comparison().within("scores", log_scores(right), log_scores(wrong), 1e-3)
    assert log_scores(torch.tensor([-2.0]), "logprob").tolist() == [-2.0]


CHAIN = dict(topk=1, num_steps=3, page_size=4, batch=3, sampling="warm")


@pytest.mark.every_value
@pytest.mark.parametrize("temperature", [1.0, 0.2])
@pytest.mark.parametrize(
    "setting",
    [dict(verifier="rejection"), dict(verifier="block"), dict(verifier="multi_round", topk=2, num_draft_tokens=7)],
    ids=lambda setting: setting["verifier"],
)
def test_a_bonus_of_a_uniform_that_is_a_little_off_is_a_mismatch(check_changed, setting, temperature, monkeypatch):
    """No difference is within rounding error, however small the mass of the residual distribution is."""

    def verify(own, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(drawing, "final_uniforms", lambda *names: (final_uniforms(*names) - 0.05).clamp(LEAST, MOST))
            return own(*arguments)

    monkeypatch.setattr(running, "compare_with_oracle", lambda *_: [])
    sampling = replace(SAMPLINGS["warm"], temperature=temperature, max_new_tokens=40)
    cell = replace(cell_of(CHAIN | setting), rounds=10, sampling=(sampling,) * 3)
    assert check(cell, "reference").mismatches == 0
    found = check_changed(cell, verify=verify)
    assert (found.mismatches > 0, found.within_rounding_error) == (True, 0)
    assert found.first_divergence.field in ("predict", "accept_index")


def accepted_at(edge: float, found: tuple[list[int], int]) -> int:
    """Reject a chain of one draft; the bonus token is 0 if `edge` is above 1, and 1 otherwise."""
    config = SpecConfig(1, 1, 2, verifier="rejection", max_len=64)
    params = SamplingParams(temperature=1.0)
    batch = Batch.of([0], [0], [4], [params], 3)
    final = float(final_uniforms(batch.seeds, batch.request_ids, batch.seq_lens)[0])
    logits = torch.tensor([final * edge, 1 - final * edge, 1e-30], dtype=torch.float64).log()
    distributions = tuple(RowDistribution.of_own_logits(logits, logits, batch.sampling) for _ in range(2))
    tree = Tree([0, 2], [-1, 0], [1, -1], [-1, -1], 9)
    step = SimpleNamespace(
        implementations=SimpleNamespace(reference=SimpleNamespace(engine=SimpleNamespace(rule=None)))
    )
    request = SimpleNamespace(config=config, batch=batch, step=step)
    return compare_accepted(ReportedWalk(request, tree, distributions, torch.eye(3)[2:], *found))


def test_bonus_tokens_near_and_away_from_their_uniforms_edge():
    zero, one = ((0,), 0), ((0,), 1)
    assert accepted_at(1 + 1e-3, zero) == accepted_at(1 - 1e-3, one) == 1
    for edge, wrong in ((1 + 1e-3, one), (1 - 1e-3, zero)):
        with pytest.raises(Mismatch, check=lambda error: error.field == "predict"):
            accepted_at(edge, wrong)
    for edge, other in ((1 + 1e-9, one), (1 - 1e-9, zero)):
        assert accepted_at(edge, other) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_perturbed_weights_lie_one_ulp_from_the_pairs(dtype):
    pair = make_pair("eagle3-llama", dtype)
    beside = perturbed(pair, 0)
    for before, after in ((pair.target.tensors, beside.target.tensors), (pair.drafter.tensors, beside.drafter.tensors)):
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert after[name].dtype == tensor.dtype
            apart = (after[name].double() - tensor.double()).abs()
            assert (apart <= torch.finfo(dtype).eps * tensor.double().abs()).all()
    moved_share = (beside.target.tensors["lm_head.weight"] != pair.target.tensors["lm_head.weight"]).float().mean()
    assert 0.4 < moved_share < 0.8
    assert torch.equal(beside.drafter.tensors["d2t"], pair.drafter.tensors["d2t"])


def test_perturbation_runs_give_every_field_its_budget():
    cell = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3))
    budgets = perturbation_budgets(cell, make_pair(cell.pair, torch.float32), "float32")
    fields_of = {"target keys", "target values", "draft keys", "draft values", "draft_input.hidden"}
    assert budgets.keys() == fields_of | {"target_logits", "draft_extend_input.hidden", "hidden"}
    assert all(0 < value < 1e-3 for value in budgets.values())


def test_perturbation_runs_that_break_ties_measure_rounding_only():
    """Under `free` a run that a broken tie parts from the exact one is realigned, as after other roundings."""
    cell = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, family="twins", mode="free"))
    budgets = perturbation_budgets(cell, make_pair(cell.pair, torch.float32), "float32")
    assert 0 < max(budgets.values()) < 1e-3
