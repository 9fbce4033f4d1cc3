import inspect
import json
import math
import sys
import types
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.display import stdout_console
from specsim.core.errors import InputError
from specsim.core.uniforms import token_noise
from specsim.correctness.exact import certify, implementations, race
from specsim.correctness.exact import optimum as optimum_module
from specsim.correctness.exact import verifier as verifier_module
from specsim.correctness.exact.breakpoints import TYPICAL_DELTA, TYPICAL_EPSILON
from specsim.correctness.exact.cases import (
    BRIDGED,
    CASES,
    CHAIN,
    CUT_CHAIN,
    CUT_TREE,
    FAR,
    GIVEN_TREE,
    LANES,
    NEAR_TREE,
    PAPER,
    Certain,
    ExactCase,
    ExactModel,
    cases_of,
    draws,
    text_prob,
    texts,
)
from specsim.correctness.exact.certificates import NAMES, VERIFIERS
from specsim.correctness.exact.controls import two_rounds
from specsim.correctness.exact.distribution import (
    ExactDistribution,
    NotConstant,
    TooDeep,
    exact_distribution,
    joint_regions,
)
from specsim.correctness.exact.optimum import optimum
from specsim.correctness.exact.report import Certificates
from specsim.correctness.exact.verifier import UNREAD, DraftedTree, grid_cost, regions, with_zero
from specsim.reference import acceptance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BY_NAME = {verifier.name: verifier for verifier in VERIFIERS}
# Three tokens, a root with two given drafts.
FEW = ExactCase("a few", ExactModel(((1, 2, 1), (2, 1, 1))), ExactModel(((1, 1, 2),)), (-1, 0, 0), (2, 1))


def distribution_of(name: str, case: ExactCase) -> ExactDistribution:
    return exact_distribution(BY_NAME[name], case, implementations.reference(BY_NAME[name]))


# Wrong verifiers and the distances of their distributions, None for one that is only small.
DISTANCES = {
    "the uniform is used twice": Fraction(2, 27),
    "draws named by position only": Fraction(1, 18),
    "noise shared by draft and recovery": Fraction(1, 40),
    "siblings share a uniform": Fraction(1, 64),
    "accept if target ≥ draft": Fraction(3, 8),
    "a uniform may be 0": None,
}


# What is certified


def test_verifiers_keep_their_promise_and_controls_are_caught():
    found = certify()
    assert found.failures == ()
    assert {row.verifier.partition(",")[0] for row in found.rows if row.promise != "wrong"} == set(NAMES)
    assert all(row.total_variation == row.impossible == 0 for row in found.rows if row.promise == "lossless")
    assert all(row.regions > 1 for row in found.rows if row.verifier != "greedy")
    # No lossless verifier accepts more than the optimum.
    gaps = {(row.verifier, row.case): row.gap for row in found.rows if row.gap is not None}
    assert min(gaps.values()) == 0
    optimal = {name for name, _ in gaps} - {name for (name, _), gap in gaps.items() if gap}
    assert optimal == {"greedy", "target_only", "block"}
    wrong = {row.verifier: row for row in found.rows if row.promise == "wrong"}
    assert {name: row.total_variation for name, row in wrong.items() if DISTANCES[name]} | {
        "a uniform may be 0": None
    } == DISTANCES
    assert 0 < wrong["a uniform may be 0"].impossible <= Fraction(2, 2**24)  # what the target never writes
    # A control with the target's distribution, or a run without a case, is a failure.
    exact = replace(wrong["the uniform is used twice"], total_variation=Fraction(0))
    assert replace(found, rows=(exact,)).failures == ("the uniform is used twice (control) on " + PAPER.name,)
    assert Certificates((), (), (), 0.0, "", {}).failures == ("no case was run",)


def test_the_papers_example_of_block_verification():
    """Token by token 10/9 drafts are accepted of p = (1/3, 2/3), q = (2/3, 1/3), block verification accepts 11/9."""
    assert distribution_of("rejection", PAPER).accepted == Fraction(10, 9)
    assert distribution_of("block", PAPER).accepted == Fraction(11, 9)
    assert optimum(PAPER) == Fraction(11, 9)


def test_draws_named_by_position_only_harm_block_verification():
    for name, by_position in product(("rejection", "block"), (False, True)):
        distance = two_rounds(BY_NAME[name], PAPER, by_position).total_variation(PAPER)
        assert distance == (Fraction(1, 18) if (name, by_position) == ("block", True) else 0)


def test_typical_acceptance_of_a_given_tree_by_hand():
    """The rule always takes one path, so its distribution is that path's and the target's next token."""
    found = distribution_of("typical", GIVEN_TREE)
    (draw,) = draws(GIVEN_TREE)
    path, _ = acceptance.typical(DraftedTree.of(draw).tree, DraftedTree.of(draw).prob_NV, 0.5, 0.09, 0.3)
    chance = text_prob(GIVEN_TREE.target, draw.text(path[-1]))
    assert found.accepted == len(path) - 1
    assert found.total_variation(GIVEN_TREE) == 1 - chance


@st.composite
def models(draw, vocab_size: int):
    """Two rows of small weights, zeros among them."""
    rows = st.lists(st.integers(0, 4), min_size=vocab_size, max_size=vocab_size).filter(any).map(tuple)
    return ExactModel(tuple(draw(st.lists(rows, min_size=2, max_size=2))))


SHAPES = {
    "best": [(-1, 0, 0, 1), (-1, 0, 1)],
    "sampled": [(-1, 0), (-1, 0, 1)],
    "siblings": [(-1, 0, 0), (-1, 0, 0, 1)],
    "distinct": [(-1, 0, 0), (-1, 0, 0, 0), (-1, 0, 0, 1)],
}


@pytest.mark.parametrize("name", [name for name, each in BY_NAME.items() if each.promise == "lossless"])
@given(data=st.data())
@settings(max_examples=6, deadline=None)  # in searches for new examples too
def test_lossless_verifiers_are_lossless_for_any_models(name, data):
    drafts = BY_NAME[name].drafts
    vocab_size = data.draw(st.integers(2, 3))
    parents = data.draw(st.sampled_from(SHAPES[drafts]))
    tokens = (1, 0, 1)[: len(parents) - 1] if drafts == "best" else None
    target, draft = (data.draw(models(vocab_size)) for _ in range(2))
    depth_limit = data.draw(st.sampled_from([FAR, 1, 0]))
    case = ExactCase("", Certain(target) if name == "greedy" else target, draft, parents, tokens, depth_limit)
    case = replace(case, is_distinct=drafts == "distinct")
    found = distribution_of(name, case)
    assert found.total_variation(case) == 0
    assert found.accepted <= min(optimum(case), depth_limit)


# Wrong verifiers


def left(node: str, prob: str) -> str:
    """Code of relu(p - q) at the limit only, where a draft follows that max_len cuts off."""
    return f"(residual({prob}, draft_prob_NV[{node}]) if tree.tokens[tree.depth_limit + 1 :] else {prob})"


DISTINCT = CASES["distinct"][1]
CERTAIN = cases_of(CASES, "best", is_greedy=True)[1]
MUTANTS = [
    ("greedy", CERTAIN, "tree.tokens[child] == best[path[-1]]", "tree.tokens[child] == best[0]"),
    ("target_only", GIVEN_TREE, "accumulated += child_prob", "accumulated = child_prob"),
    ("target_only", GIVEN_TREE, "prob_V[tree.tokens[child]] = 0.0", "pass"),
    ("target_only", GIVEN_TREE, "uniforms[len(path) - 1] <=", "uniforms[0] <="),
    ("rejection", PAPER, "uniforms[node - 1] * float(draft_prob_V[token]) >=", "uniforms[node - 1] >="),
    ("rejection", CHAIN, "(prob_V - draft_prob_V).clamp(min=0)", "1 * prob_V"),
    ("rejection", CHAIN, "inverse_cdf(prob_NV[last], final_uniform)", "inverse_cdf(prob_NV[0], final_uniform)"),
    ("block", PAPER, "uniforms[node - 1] * (mass + 1 - scale) < mass", "uniforms[node - 1] < mass"),
    ("block", CHAIN, "(scale * prob_NV[node] - draft_prob_NV[node])", "(prob_NV[node] - draft_prob_NV[node])"),
    ("block", CHAIN, "scale = target / draft if target < draft else float(draft > 0)", "scale = target / draft"),
    ("block", CHAIN, "        if passes:", "        if passes and accepted == node - 1:"),
    ("multi_round", LANES, "prob_V = prob_V / prob_V.sum()", "pass"),
    ("multi_round", LANES, "uniforms[child]", "uniforms[1]"),
    ("multi_round", LANES, "prob_V = residual(prob_V, draft", "prob_V = residual(prob_NV[path[-1]], draft"),
    ("rejection", CUT_CHAIN, "inverse_cdf(prob_NV[last], final", f"inverse_cdf({left('last', 'prob_NV[last]')}, final"),
    ("block", CUT_CHAIN, "weight_V = prob_NV[node]", f"weight_V = {left('node', 'prob_NV[node]')}"),
    ("multi_round", CUT_CHAIN, "inverse_cdf(prob_V, final", f"inverse_cdf({left('path[-1]', 'prob_V')}, final"),
    ("traversal", LANES, "weight = mass / (mass + 1 - weight) if", "weight = weight if"),
    ("traversal", LANES, "prob_V = weight_V / mass if mass > 0 else prob_V", "pass"),
    ("traversal", LANES, "uniforms[path[-1]] < weight", "uniforms[1] < weight"),
    ("traversal", LANES, "ratio = weight * prob_V[token]", "ratio = prob_V[token]"),
    ("recursive", DISTINCT, "prob_V = prob_V / prob_V.sum()", "pass"),
    ("recursive", DISTINCT, "draft_prob_V = without(draft_prob_V, token)", "pass"),
    ("recursive", DISTINCT, "without(draft_prob_V, token)", "without(draft_prob_NV[path[-1]], token) * 0.5"),
    ("gumbel", CHAIN, "noise_WV[depths]", "noise_WV[0]"),
    ("gumbel", CHAIN, "prob_NV.log() +", "prob_NV +"),
]


def is_certified(name: str, case: ExactCase) -> bool:
    try:
        return distribution_of(name, case).total_variation(case) == 0
    except NotConstant:
        return False


@pytest.mark.parametrize(("name", "case", "text", "instead"), MUTANTS)
def test_a_wrong_verifier_is_not_certified(name, case, text, instead, monkeypatch):
    change_verifier(name, text, instead, monkeypatch)
    assert not is_certified(name, case)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("prob_NV[parent, token] > threshold_N[parent]", "prob_NV[parent, token] >= threshold_N[parent]"),
        (".clamp(max=epsilon)", ".clamp(max=1.0)"),
        ("(delta * (-entropy_N).exp())", "((-entropy_N).exp())"),
        ("(-entropy_N).exp()", "entropy_N.exp()"),
        ("prob_NV[parent, token] > threshold_N[parent]", "prob_NV[parent, token] > threshold_N[0]"),
    ],
)
def test_a_threshold_that_is_read_wrongly_changes_a_lossy_rule(text, instead, monkeypatch):
    names = TYPICAL_DELTA.name, TYPICAL_EPSILON.name
    right = [distribution_of(name, NEAR_TREE).total_variation(NEAR_TREE) for name in names]
    change_verifier("typical", text, instead, monkeypatch)
    assert [distribution_of(name, NEAR_TREE).total_variation(NEAR_TREE) for name in names] != right


def test_implementations_of_a_lossy_rule_have_to_agree():
    found = certify("typical")
    row = found.rows[0]
    other = replace(row, impl="fast", accepted=row.accepted - Fraction(1, 2))
    text = f"typical on {row.case}: reference and fast accept differently"
    assert replace(found, rows=(*found.rows, other)).failures == (text,)
    assert replace(found, rows=(*found.rows, replace(row, impl="fast"))).failures == ()


def change_verifier(name: str, text: str, instead: str, monkeypatch) -> None:
    """Replace a part of a reference verifier's code."""
    source = inspect.getsource(acceptance)
    function = inspect.getsource(getattr(acceptance, name))
    part = function if text in function else source
    assert part.count(text) == 1
    changed = types.ModuleType("specsim.reference.changed")
    monkeypatch.setitem(sys.modules, changed.__name__, changed)
    exec(source.replace(part, part.replace(text, instead)), changed.__dict__)
    monkeypatch.setattr(acceptance, name, getattr(changed, name))


HALF = regions([Fraction(1, 2)])


@pytest.mark.parametrize(
    "changes",
    [
        # Breakpoints of another verifier: an outcome changes inside a region.
        dict(axes=lambda draw: [UNREAD] * 2),
        dict(last=lambda draw, node: UNREAD),
        # A path that depends on the final uniform, whose regions are those of the node where the path ends.
        dict(
            axes=lambda draw: [],
            last=lambda draw, node: HALF,
            accept=lambda given, uniforms, final: (given.tree.path(int(final < 0.5)), 0),
        ),
    ],
)
def test_outcomes_that_change_within_a_region_are_refused(changes):
    other = replace(BY_NAME["rejection"], **changes)
    with pytest.raises(NotConstant):
        exact_distribution(other, PAPER, implementations.reference(other))


@pytest.mark.parametrize("name", ["greedy", "typical", "gumbel", "block"])
def test_a_path_beyond_max_len_is_refused(name):
    """The error is reported whatever the distribution, which may be the target's."""
    (case,) = cases_of({"": (CUT_TREE if BY_NAME[name].drafts == "best" else CUT_CHAIN,)}, "", name == "greedy")
    far = replace(BY_NAME[name], accept=lambda given, *drawn: BY_NAME[name].accept(unlimited(given), *drawn))
    with pytest.raises(TooDeep):
        exact_distribution(far, case, implementations.reference(far))


def unlimited(given: DraftedTree) -> DraftedTree:
    """The same tree without an end before its leaves."""
    return replace(given, tree=replace(given.tree, depth_limit=FAR))


# The fast implementation


def few(name: str) -> ExactCase:
    """Launches that take the interpreter a few seconds."""
    if name == "greedy":
        return replace(FEW, target=Certain(FEW.target))
    drafts = BY_NAME[name].drafts
    if drafts == "best":
        return FEW
    parents = (-1, 0) if drafts == "sampled" else (-1, 0, 0)
    models = ExactModel(((1, 2), (2, 1))), ExactModel(((2, 1),))
    return ExactCase("", *models, parents, is_distinct=drafts == "distinct")


@pytest.mark.parametrize("name", [name for name in BY_NAME if "," not in name])
def test_fast_and_reference_have_equal_distributions(name):
    case = few(name)
    verifier = BY_NAME[name]
    found = exact_distribution(verifier, case, implementations.fast(verifier, DEVICE))
    assert found == distribution_of(name, case)
    assert (found.total_variation(case) == 0) == (verifier.promise == "lossless")


@pytest.mark.parametrize(
    ("name", "case"),
    [("multi_round", LANES), ("traversal", LANES), ("recursive", DISTINCT), ("block", CHAIN), ("gumbel", CHAIN)],
)
def test_fast_and_reference_have_equal_outcomes(name, case):
    """Select a dozen of all regions."""
    drafted = list(draws(case))
    verifier = BY_NAME[name]
    found = joint_regions(verifier, drafted, implementations.reference(verifier))
    trials = [region.trials[0] for region in found][:: 1 + len(found) // 12]
    expected = implementations.reference(verifier)(drafted, trials)
    assert implementations.fast(verifier, DEVICE)(drafted, trials) == expected


def test_cases_left_out_of_the_fast_implementation_are_named(capsys):
    found = certify("block", impl="both", device=DEVICE)
    assert found.not_run == (() if DEVICE == "cuda" else (BRIDGED.name, CHAIN.name))
    assert [(row.impl, row.case) for row in found.rows] == [
        (impl, case.name)
        for impl, not_run in (("reference", ()), ("fast", found.not_run))
        for case in CASES["sampled"]
        if case.name not in not_run
    ]
    found.show(stdout_console())
    names = f"{BRIDGED.name}; {CHAIN.name}"
    is_named = f"The fast implementation was not run on: {names}." in " ".join(capsys.readouterr().out.split())
    assert is_named == bool(found.not_run)


def test_requests_are_found_whose_noise_lies_in_a_region():
    """The kernels derive noise from names: every region of a race has its own requests."""
    drafted = list(draws(PAPER))
    reference = implementations.reference(BY_NAME["gumbel"])
    trials = [trial for region in joint_regions(BY_NAME["gumbel"], drafted, reference) for trial in region.trials]
    ids = implementations.ids_with_noise(drafted, trials)
    assert len({*zip(ids, (trial.draw for trial in trials), strict=True)}) == len(trials)
    positions = implementations.LENGTH + 1 + torch.arange(3)
    noise_RWV = token_noise(torch.zeros(len(ids), 1, dtype=torch.int64), torch.tensor(ids)[:, None], positions, 2)
    real = [
        replace(trial, uniforms=tuple(map(tuple, own.tolist()))) for trial, own in zip(trials, noise_RWV, strict=True)
    ]
    assert reference(drafted, real) == reference(drafted, trials)


def test_a_fast_implementation_with_other_settings_is_refused():
    verifier = replace(BY_NAME["target_only"], settings={"threshold_acc": 0.5})
    with pytest.raises(NotConstant):
        exact_distribution(verifier, FEW, implementations.fast(verifier, DEVICE))


# Uniforms


@given(st.lists(st.fractions(-1, 2, max_denominator=12), max_size=5))
@settings(max_examples=40)
def test_regions_lie_between_the_cuts_and_cover_the_range(cut):
    axis = regions(cut, Fraction(1, 4), Fraction(1, 2))
    assert sum(region.volume for region in axis) == 1
    inside = {each for each in cut if Fraction(1, 4) < each < Fraction(1, 2)}
    assert len(axis) == len(inside) + 1
    for region in axis:
        assert len(region.points) == 3
        assert all(region.edges[0] < point < region.edges[1] for point in region.points)


@given(st.lists(st.fractions(0, 1, max_denominator=24), max_size=4))
@settings(max_examples=40)
def test_grid_cost_bounds_any_assignment_of_its_edges(cut):
    """On a grid of 16 points, 0 counted as 1: every region's mass is within what the bound allows."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(verifier_module, "GRID", 16)
        axis = regions(cut)
        bound = grid_cost(axis)
        for to_the_left in (False, True):
            uniforms = [Fraction(max(k, 1), 16) for k in range(16)]
            masses = [
                Fraction(sum(low < u <= high if to_the_left else low <= u < high for u in uniforms), 16)
                for low, high in (region.edges for region in axis)
            ]
            assert sum(masses) == 1
            exact = sum(abs(mass - region.volume) for mass, region in zip(masses, axis, strict=True)) / 2
            assert exact <= bound <= Fraction(len(axis), 8)


def test_grid_cost_counts_uniforms_read_and_uniforms_of_drafts():
    """With p = (1/2, 1/2) and q = (3/4, 1/4), two of the breakpoints are points of the grid.

    The breakpoints 3/4 of the draw and 1/2 of the bonus token cost one each; 2/3 of token 0's uniform costs less.
    """
    case = ExactCase("", ExactModel(((1, 1),)), ExactModel(((3, 1),)), (-1, 0))
    point = Fraction(1, 2**24)
    assert 2 * point < distribution_of("rejection", case).grid <= (2 + Fraction(3, 4)) * point
    given_draft = replace(case, tokens=(0,))
    assert distribution_of("target_only", given_draft).grid == 2 * point
    assert distribution_of("gumbel", case).grid == 0


def test_a_uniform_that_may_be_zero_has_that_point_as_a_region():
    zero, *rest = with_zero(regions([Fraction(1, 2)]), Fraction(1, 8))
    assert (zero.volume, zero.points) == (Fraction(1, 8), (0.0, 0.0, 0.0))
    assert [region.volume for region in rest] == [Fraction(7, 16)] * 2


# The race of Gumbel noise


@st.composite
def distributions(draw, least: int = 2, most: int = 4):
    count = draw(st.integers(least, most))
    rows = st.lists(st.integers(0, 5), min_size=count, max_size=count).filter(any)
    return tuple(tuple(Fraction(n, sum(row)) for n in row) for row in (draw(rows), draw(rows)))


def joint(target_V, draft_V):
    """Probability of every pair (target's token, draft), and the regions."""
    found = {}
    for draft, chance in enumerate(draft_V):
        if chance:
            axis = race.position(target_V, draft_V, draft)
            found |= {(region, draft): region.volume * chance for region in axis}
    return found


def winner(target_V, noise) -> int:
    return max((math.log(prob) + each, token) for token, (prob, each) in enumerate(zip(target_V, noise)) if prob)[1]  # noqa: B905


@given(distributions())
def test_both_winners_of_a_race_have_their_own_distributions(pair):
    target_V, draft_V = pair
    target = [Fraction(0)] * len(target_V)
    drafted = [Fraction(0)] * len(target_V)
    for (region, draft), volume in joint(target_V, draft_V).items():
        tokens = {winner(target_V, noise) for noise in region.points}
        assert {winner(draft_V, noise) for noise in region.points} == {draft}
        assert len(tokens) == 1
        target[tokens.pop()] += volume
        drafted[draft] += volume
    assert (tuple(target), tuple(drafted)) == pair


@given(distributions())
def test_winners_agree_as_often_as_the_coupling_promises(pair):
    """At least (1 - TV) / (1 + TV), at most 1 - TV, of one draft (arXiv 2408.07978)."""
    target_V, draft_V = pair
    distance = sum(abs(p - q) for p, q in zip(target_V, draft_V, strict=True)) / 2
    agree = sum(
        volume
        for (region, draft), volume in joint(target_V, draft_V).items()
        if winner(target_V, region.points[0]) == draft
    )
    assert (1 - distance) / (1 + distance) <= agree <= 1 - distance


def test_a_race_of_three_against_its_integral():
    """The pair (0, 2) wins if E_0 / E_2 is in (1/2, 2) and E_1 is later than both."""
    target_V, draft_V = (tuple(Fraction(n, 4) for n in row) for row in ((2, 1, 1), (1, 1, 2)))
    (value,) = [
        v
        for (region, draft), v in joint(target_V, draft_V).items()
        if (winner(target_V, region.points[0]), draft) == (0, 2)
    ]
    steps = 20_000
    middles = [0.5 + 1.5 * (step + 0.5) / steps for step in range(steps)]
    expected = sum((1 + t + max(t / 2, 0.5)) ** -2 for t in middles) * 1.5 / steps
    assert float(value) == pytest.approx(expected, abs=1e-8)


# The optimum


@given(distributions(3, 3))
@settings(max_examples=10)
def test_the_optimum_of_one_draft_is_the_maximal_coupling(pair):
    common = math.lcm(*(prob.denominator for prob in (*pair[0], *pair[1])))
    target, draft = (ExactModel((tuple(int(prob * common) for prob in prob_V),)) for prob_V in pair)
    case = ExactCase("", target, draft, (-1, 0))
    assert optimum(case) == sum(map(min, *pair))


def test_the_optimum_of_two_siblings_by_hand():
    """p = (1/2, 1/2), q = (1, 0): both hold token 0. q = (1/2, 1/2): only if both are alike can a token be missed."""
    for weights, expected in (((1, 0), Fraction(1, 2)), ((1, 1), Fraction(1)), ((3, 1), Fraction(15, 16))):
        case = ExactCase("", ExactModel(((1, 1),)), ExactModel((weights,)), (-1, 0, 0))
        assert optimum(case) == expected


def test_prices_that_prove_nothing_are_refused(monkeypatch):
    """Texts without prices would allow all drafts to be accepted."""
    solve = optimum_module._solve

    def free(case, drafted, written, ends):
        return solve(case, drafted, written, ends)[0], [0.0] * len(written)

    monkeypatch.setattr(optimum_module, "_solve", free)
    with pytest.raises(ArithmeticError):
        optimum(PAPER)


def test_the_drawn_trees_are_all_there_are():
    for case in (*CASES["sampled"], *CASES["siblings"], *CASES["distinct"]):
        drafted = list(draws(case))
        assert sum(draw.prob for draw in drafted) == 1
        assert len({draw.tokens for draw in drafted}) == len(drafted)
    for case in CASES["best"]:
        assert [draw.prob for draw in draws(case)] == [1]
        for length in (1, 2):
            assert sum(text_prob(case.target, text) for text in texts(4, length)) == 1
    assert sum(cases_of(CASES, "best", is_greedy=True)[0].target((1,))) == 1


# The command


def test_the_command_prints_and_writes_the_certificates(call, tmp_path):
    status, out, _ = call("certify", "--verifier", "block", "--json", str(tmp_path / "c.json"))
    result = json.loads((tmp_path / "c.json").read_text())
    assert status == 0
    assert "All 5 lossless certificates hold: the distribution is exactly the target's." in out
    assert {row["total_variation"] for row in result["certificates"]} == {"0"}
    assert {row["accepted"] for row in result["certificates"]} == {"11/9", "105/64", "17/16", "2/3", "8/9"}
    assert (result["is_ok"], result["failures"]) == (True, [])
    assert result["command"].startswith("specsim certify --verifier block")


def test_the_command_fails_where_a_promise_is_not_kept(call, tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "residual", lambda prob_V, draft_prob_V: prob_V)
    status, out, _ = call("certify", "--verifier", "rejection", "--json", str(tmp_path / "c.json"))
    assert (status, "Not as promised: rejection (reference) on " in " ".join(out.split())) == (1, True)
    assert json.loads((tmp_path / "c.json").read_text())["is_ok"] is False


@pytest.mark.parametrize(
    "arguments", [{"verifier": "blocks"}, {"impl": "slow"}, {"device": "tpu", "impl": "fast"}, {"device": "cuda"}]
)
def test_bad_input_is_refused(arguments):
    name, value = next(iter(arguments.items()))
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        certify(**arguments)
