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


def rank(fast, exact_V, reference_V=None, exact=None):
    """Whether a ranking equals the exact one, and the ties in it; None for a mismatch. The noise is 0.5."""
    exact_V = torch.tensor(exact_V, dtype=torch.float64)
    exact = exact or torch.sort(exact_V, descending=True, stable=True).indices[: len(fast)].tolist()
    ranking = Ranking(exact_V if reference_V is None else torch.tensor(reference_V), exact_V, 0.5)
    check = comparison()
    try:
        return ranking.compare(check, "field", Trio(exact, exact, fast)), check.tally.coverage["ties"]
    except Mismatch:
        return None


def test_the_budget_is_measured_between_the_references():
    reference, exact = torch.tensor([1.0, 2.5]), torch.tensor([1.25, 2.0], dtype=torch.float64)
    assert budget(reference, exact, 0.0) == 2.0
    assert budget(reference, exact, 0.125) == 2.0 + 16 * 0.125 * 2
    assert budget(reference, exact, 0.125, magnitude=8.0) == 2.0 + 16 * 0.125 * 8
    assert budget(torch.empty(0), torch.empty(0), 1.0) == 0
    assert budget(torch.tensor([-torch.inf]), torch.tensor([-torch.inf]), 1.0) == 0
    # Of a log probability, the largest error of all logits decides, even if the compared probabilities are right.
    reference, exact = torch.tensor([[1.0, 2.0, 9.5]]), torch.tensor([[1.0, 2.0, 9.0]], dtype=torch.float64)
    assert log_prob_budget(reference, exact, 0.0) == 4.0


@pytest.mark.parametrize(("count", "dtype"), [(64, torch.bfloat16), (63, torch.bfloat16), (64, torch.float32)])
def test_errors_in_16_bits_are_bounded_on_average_too(count, dtype):
    """Every entry is within the budget of the largest error, but a right program has few such errors."""
    exact = torch.ones(count, dtype=torch.float64)
    reference = exact.index_fill(0, torch.tensor([0]), 1.25).to(dtype)
    check = FieldChecks(Tally(), torch.finfo(dtype).eps)
    check.close("field", Trio(reference, exact, reference))
    wrong = Trio(reference, exact, (exact + 0.5).to(dtype))
    if (count, dtype) == (64, torch.bfloat16):
        with pytest.raises(Mismatch, check=lambda error: error.field == "field (rms)"):
            check.close("field", wrong)
    else:
        check.close("field", wrong)


TIED = [1.0, 1.0, 1.0, -9.0]  # the noise would allow any order of ids 0, 1 and 2
SWAPPED = (False, 0)


@pytest.mark.parametrize(
    ("arguments", "outcome"),
    [
        # Two values change places only within twice their noise.
        (([1, 0], [1.0, 1.0 - 0.999, -9.0]), SWAPPED),
        (([1, 0], [1.0, 1.0 - 1.001, -9.0]), None),
        # Values that are equal in both precisions go by index.
        *((([fast, then], TIED), None) for fast, then in ((1, 0), (1, 2), (0, 2), (0, 0))),
        (([0, 1], TIED), (True, 1)),
        # Values that are equal in only one precision may swap.
        (([1, 0], [1.0, 1.0, -9.0], [1.0, 1.1, -9.0]), SWAPPED),
        # A shifted ranking is not taken for a broken tie.
        (([1, 2, 0], [1.0, 0.9, 0.9, -9.0], None, [0, 1, 2]), (False, 1)),
    ],
)
def test_rankings_differ_as_far_as_rounding_explains(arguments, outcome):
    assert rank(*arguments) == outcome


def holds(compare, *arguments) -> bool:
    try:
        return compare("field", *arguments) is not False
    except Mismatch:
        return False


@pytest.mark.parametrize(
    ("known", "gap", "may_swap"), [(True, 1e-9, False), (False, 1e-9, True), (False, 1e-3, False), (True, 0, False)]
)
def test_greedy_choices_from_known_logits_are_exact(known, gap, may_swap):
    adjusted_V = torch.tensor([2.0, 2.0 - gap, 0.0], dtype=torch.float64)
    distribution = RowDistribution(adjusted_V, ONE, rounding(adjusted_V), known)
    assert [holds(distribution.compare_argmax, token, 0) for token in (0, 1)] == [True, may_swap]


def test_a_draw_may_miss_its_share_by_the_slack():
    """A token without mass is never drawn."""
    distribution = RowDistribution(torch.zeros(8, dtype=torch.float64), ONE, 1e-6)
    prob_V = distribution.prob()
    for beyond, fits in ((0.9, True), (1.1, False)):
        uniform = 0.125 + beyond * distribution.slack
        assert [holds(distribution.compare_draw, prob_V, uniform, token, 0) for token in (0, 1)] == [fits, True]
    without_mass_V = prob_V.index_fill(0, torch.tensor([3]), 0.0)
    assert not holds(distribution.compare_draw, without_mass_V, 0.375, 3, 0)


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
    [dict(verifier="rejection"), dict(verifier="block")]
    + [dict(verifier=name, topk=2, num_draft_tokens=7) for name in ("multi_round", "traversal", "recursive")],
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
