"""Certificates of acceptance rules of a user: proofs, refutations, and rules that can be neither proved nor refuted."""

import json
import math
import random
from fractions import Fraction

import pytest
import torch

from specsim import AcceptanceRule, Accepted, InputError
from specsim.core.uniforms import lane_accept_uniforms
from specsim.correctness import wrong_rules
from specsim.correctness.exact import certify_rules, load_rules
from specsim.correctness.exact.breakpoints import BLOCK, MULTI_ROUND, RECURSIVE, REJECTION, TARGET_ONLY, TRAVERSAL
from specsim.correctness.exact.cases import CASES, PAPER, RULE_CASES, ExactCase, ExactModel
from specsim.correctness.exact.distribution import exact_distribution
from specsim.correctness.exact.exact_number import ExactNumber, NotExact
from specsim.correctness.exact.exact_tensor import ExactTensor
from specsim.correctness.exact.exploration import explore
from specsim.correctness.exact.implementations import reference
from specsim.correctness.exact.rule_distribution import Broken, NotCertified, rule_distribution
from specsim.reference import acceptance
from specsim.reference.acceptance import residual
from specsim.reference.sampling import inverse_cdf

HALF = Fraction(1, 2)
ONE_DRAFT = ExactCase("1 draft", ExactModel(((1, 3), (3, 1))), ExactModel(((3, 1), (1, 1))), (-1, 0))
CHAIN = ExactCase("2 drafts", ExactModel(((1, 3), (3, 1), (1, 1))), ExactModel(((3, 1), (1, 1))), (-1, 0, 1))


# Rules


def follow(tree, prob_NV, _draft_prob_NV, uniforms, _final):
    """Draw the target's token, and follow the child that holds it."""
    path = [0]
    while True:
        token = inverse_cdf(prob_NV[path[-1]], uniforms[len(path) - 1])
        child = next((each for each in tree.acceptable_children(path) if tree.tokens[each] == token), None)
        if child is None:
            return Accepted(path, token)
        path.append(child)


def rejection_by_user(tree, prob_NV, draft_prob_NV, uniforms, final):
    """Write chain rejection with torch's functions and a normalised residual."""
    node = 0
    for child in tree.chain():
        token = tree.tokens[child]
        if uniforms[node] > torch.minimum(prob_NV[node], draft_prob_NV[node])[token] / draft_prob_NV[node, token]:
            left_V = torch.relu(prob_NV[node] - draft_prob_NV[node])
            return Accepted(tree.path(node), int(((left_V / left_V.sum()).cumsum(0) > final).nonzero()[0]))
        node = child
    return Accepted(tree.path(node), int((prob_NV[node].cumsum(0) > final).nonzero()[0]))


def one_of_equals(tree, prob_NV, _draft_prob_NV, uniforms, _final):
    """Draw one of 8 equal shares of a uniform's range: int() of an affine function."""
    del tree
    share = int(uniforms[0] * 8)
    return Accepted([0], next(token for token in range(prob_NV.shape[1]) if prob_NV[0, : token + 1].sum() * 8 > share))


def accept_always(tree, prob_NV, _draft_prob_NV, _uniforms, final):
    last = len(tree.chain())
    return Accepted(tree.path(last), inverse_cdf(prob_NV[last], final))


def with_uniforms(change):
    """Chain rejection with other uniforms."""

    def accept(tree, prob_NV, draft_prob_NV, uniforms, final):
        return acceptance.rejection(tree, prob_NV, draft_prob_NV, *change(uniforms, final))

    return accept


def with_bonus(weights):
    """Chain rejection whose bonus after a rejection has other weights."""

    def accept(tree, prob_NV, draft_prob_NV, uniforms, final):
        path, bonus = acceptance.rejection(tree, prob_NV, draft_prob_NV, uniforms, final)
        if path[-1] == len(tree.chain()):
            return Accepted(path, bonus)
        return Accepted(path, weights(prob_NV, draft_prob_NV, path[-1], final))

    return accept


def unnormalised(prob_NV, draft_prob_NV, node, final):
    cdf = residual(prob_NV[node], draft_prob_NV[node]).cumsum(-1)
    return next((token for token in range(len(cdf)) if cdf[token] > final), len(cdf) - 1)


def of_next_node(prob_NV, draft_prob_NV, node, final):
    return inverse_cdf(residual(prob_NV[node], draft_prob_NV[node + 1]), final)


def from_target(prob_NV, _draft_prob_NV, node, final):
    return inverse_cdf(prob_NV[node], final)


def rule(accept, drafts="sampled", **fields):
    return AcceptanceRule(getattr(accept, "__name__", "rule"), drafts, accept, **fields)


def distance_of(accept, case, drafts="sampled"):
    return rule_distribution(rule(accept, drafts), case).exact.total_variation(case)


# Proofs


@pytest.mark.parametrize(
    ("accept", "drafts"),
    [(rejection_by_user, "sampled"), (with_uniforms(lambda us, final: (us, final)), "sampled"), (follow, "best")],
)
def test_a_right_rule_of_a_user_is_proved(accept, drafts):
    found = certify_rules([rule(accept, drafts)])
    assert (found.failures, found.not_certified) == ((), ())
    assert len(found.rows) == len(RULE_CASES[drafts])
    assert all(row.total_variation == 0 and row.counterexample is None for row in found.rows)
    assert drafts == "sampled" or {row.gap for row in found.rows} == {0}  # no rule accepts more of a given tree


def test_whole_shares_of_a_uniform_are_exact():
    eighths = ExactCase("eighths", ExactModel(((1, 2, 5),)), ExactModel(((1, 1, 1),)), (-1, 0), (0,), depth_limit=0)
    assert distance_of(one_of_equals, eighths, "best") == 0


@pytest.mark.parametrize(
    ("verifier", "case"),
    [
        (each, case)
        for each in (TARGET_ONLY, REJECTION, BLOCK, MULTI_ROUND, TRAVERSAL, RECURSIVE)
        for case in CASES[each.drafts][:2]
    ],
    ids=lambda value: value.name,
)
def test_derived_and_explored_breakpoints_give_one_distribution(verifier, case):
    """The same functions, once with breakpoints from papers/, once with those of their own comparisons."""

    def accept(tree, prob_NV, draft_prob_NV, uniforms, final):
        if verifier is TARGET_ONLY:
            return acceptance.target_only(tree, prob_NV, uniforms, final, 1.0, 1.0)
        return getattr(acceptance, verifier.name)(tree, prob_NV, draft_prob_NV, uniforms, final)

    derived = exact_distribution(verifier, case, reference(verifier))
    explored = rule_distribution(rule(accept, verifier.drafts), case).exact
    nonzero = {text: prob for text, prob in derived.text_probs.items() if prob}
    assert {text: prob for text, prob in explored.text_probs.items() if prob} == nonzero
    assert explored.accepted == derived.accepted
    assert explored.regions <= derived.regions


# Refutations


@pytest.mark.parametrize(
    ("accept", "case", "distance"),
    [
        # p = (1/4, 3/4), q = (3/4, 1/4) at the root
        (accept_always, ONE_DRAFT, HALF),
        (with_bonus(from_target), ONE_DRAFT, Fraction(1, 8)),
        (with_uniforms(lambda us, final: (us, us[0])), ONE_DRAFT, None),
        (wrong_rules.shared_uniform, CHAIN, None),
        (wrong_rules.shared_uniform, PAPER, Fraction(1, 9)),
        (with_bonus(unnormalised), RULE_CASES["sampled"][3], None),
        (with_bonus(of_next_node), CASES["sampled"][1], None),
        (with_uniforms(lambda us, final: ([each * (1 - 2**-30) for each in us], final)), ONE_DRAFT, None),
    ],
)
def test_wrong_rules_are_refuted(accept, case, distance):
    found = rule_distribution(rule(accept), case)
    wrong = found.exact.total_variation(case)
    assert wrong > 0 if distance is None else wrong == distance
    assert found.counterexample is not None


def test_one_draft_does_not_show_a_shared_uniform():
    """A rule without a promise is not refuted."""
    found = certify_rules([rule(wrong_rules.shared_uniform, lossless=False)])
    assert found.failures == ()
    is_one = {case.name: len(case.parents) == 2 or case.depth_limit in (0, 1) for case in RULE_CASES["sampled"]}
    assert {row.total_variation for row in found.rows if is_one[row.case]} == {0}
    assert sum(row.total_variation > 0 for row in found.rows) == 5


def test_a_counterexample_names_the_smallest_case_and_its_region():
    found = certify_rules([rule(with_bonus(from_target))])
    first = next(row for row in found.rows if row.counterexample)
    assert len(first.counterexample.draw.parents) == 2
    text = str(first.counterexample)
    assert "tokens [root, 0]" in text
    assert "p after every node (1/4, 3/4) (3/4, 1/4), q (3/4, 1/4)" in text
    assert "uniforms[0] in (0, 1/3)" in text
    assert first.counterexample.to_json()["uniforms"][0] == ["0", "1/3"]
    assert first.counterexample.to_json()["final_uniform"] == ["0", "3/4"]


def by_elder(tree, prob_NV, draft_prob_NV, uniforms, final):
    """Accept each node with the uniform of the one before, the first with the root's."""
    return acceptance.multi_round(tree, prob_NV, draft_prob_NV, [0.5, *uniforms], final)


def test_the_roots_uniform_is_no_further_one():
    names = torch.tensor([3]), torch.tensor([5]), torch.tensor([7])
    uniforms = lane_accept_uniforms(*names, 1, 2)[0].tolist()
    assert uniforms[0] == uniforms[1] != uniforms[2]
    pair = next(case for case in RULE_CASES["siblings"] if case.name == "3 tokens, 2 siblings")
    assert distance_of(by_elder, pair, "siblings") > 0


@pytest.mark.parametrize(
    ("accept", "drafts"), [(acceptance.multi_round, "distinct"), (acceptance.recursive, "siblings")]
)
def test_drafts_are_verified_as_they_were_drawn(accept, drafts):
    """Neither rule is lossless for the other's siblings."""
    pair = next(case for case in CASES[drafts] if case.parents == (-1, 0, 0))
    assert distance_of(accept, pair, drafts) > 0


def divide_by_zero(_tree, _prob_NV, _draft_prob_NV, uniforms, _final):
    return Accepted([0], 1 // 0 if uniforms[0] > 0.75 else 0)


def leave(*_):
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("accept", "text"),
    [
        (divide_by_zero, "uniforms[0] in (3/4, 1) it raises ZeroDivisionError"),
        (leave, "it raises SystemExit"),
        (lambda *_: Accepted([0, 5], 0), "it returns the path [0, 5], with node 5 after node 0"),
        (lambda tree, *_: Accepted([0, 1, 2], 0), "node 1 of the argument tree has no children"),
        (lambda tree, prob_NV, draft_prob_NV, uniforms, _: uniforms[9], "the argument uniforms has 2 entries for"),
        (lambda *_: Accepted([0], 2), "it returns the bonus token 2"),
        (lambda *_: None, "it returns the value None"),
        (lambda *_: "text", "it returns the value 'text'"),
    ],
)
def test_a_rule_without_a_result_is_refuted_in_a_sentence(accept, text):
    found = certify_rules([rule(accept)])
    assert len(found.failures) == 1
    assert text in found.failures[0]
    assert found.not_certified == ()


def test_a_rule_for_other_drafts_is_told_what_it_misread():
    found = certify_rules([rule(lambda tree, prob_NV, draft_prob_NV, *_: draft_prob_NV[0], "best")])
    assert "the argument draft_prob_NV is None for drafts best" in found.failures[0]


def test_a_path_beyond_max_len_is_refuted():
    cut = next(case for case in RULE_CASES["sampled"] if case.depth_limit == 0)
    with pytest.raises(Broken):
        rule_distribution(rule(lambda *_: Accepted([0, 1], 0)), cut)


# Neither


def multiply(_tree, _prob_NV, _draft_prob_NV, uniforms, final):
    return Accepted([0], int(uniforms[0] * final < 0.5))


def compare_two(_tree, _prob_NV, _draft_prob_NV, uniforms, final):
    return Accepted([0], int(uniforms[0] < final))


def swallow(tree, prob_NV, draft_prob_NV, uniforms, final):
    """Hide that a logarithm of a uniform has no exact result."""
    try:
        math.log(uniforms[0])
    except Exception:
        return Accepted([0], 0)
    return acceptance.rejection(tree, prob_NV, draft_prob_NV, uniforms, final)


def soft(_tree, prob_NV, _draft_prob_NV, _uniforms, final):
    return Accepted([0], inverse_cdf(torch.softmax(prob_NV[0], -1), final))


def by_type(tree, prob_NV, draft_prob_NV, uniforms, final):
    """Behave only where no float is passed."""
    if isinstance(uniforms[0], float):
        return Accepted([0], 0)
    return acceptance.rejection(tree, prob_NV, draft_prob_NV, uniforms, final)


def rounded(tree, prob_NV, draft_prob_NV, uniforms, final):
    """Divide floats, so that a threshold of 1/3 is rounded."""
    if uniforms[0] < float(prob_NV[0, tree.tokens[1]]) / float(draft_prob_NV[0, tree.tokens[1]]):
        return Accepted([0, 1], inverse_cdf(prob_NV[1], final))
    return Accepted([0], inverse_cdf(residual(prob_NV[0], draft_prob_NV[0]), final))


def own_draw(*_):
    return Accepted([0], random.randrange(2))


def many_parts(_tree, _prob_NV, _draft_prob_NV, uniforms, _final):
    return Accepted([0], int(uniforms[0] * 10**5) % 2)


def private_draw():
    own = random.Random(0)
    return lambda *_: Accepted([0], own.randrange(2))


def counting():
    calls = []

    def accept(*_):
        calls.append(1)
        return Accepted([0], len(calls) % 3 == 0)

    return accept


@pytest.mark.parametrize(
    ("accept", "text"),
    [
        (multiply, "multiplies uniforms[0] by final_uniform"),
        (compare_two, "combines two uniforms, uniforms[0] and final_uniform"),
        (swallow, "into a float, which depends on uniforms[0]"),
        (soft, "torch.softmax"),
        (by_type, "with floats it returns ([0], 0)"),
        (rounded, "of the size of rounding errors"),
        (own_draw, "random numbers of its own"),
        (private_draw(), "with floats it returns"),
        (counting(), "with floats it returns"),
        (many_parts, "more than 50,000 numbers"),
        (with_uniforms(lambda us, final: ([each * (1 - 2**-45) for each in us], final)), "of the size of rounding"),
    ],
)
def test_what_is_not_exact_is_never_proved(accept, text):
    with pytest.raises(NotCertified, match=None, check=lambda error: text in str(error)):
        rule_distribution(rule(accept), ONE_DRAFT)
    found = certify_rules([rule(accept)])
    assert len(found.not_certified) == 1
    assert found.rows == ()


# Regions and exact numbers


def regions_of(function, count=1):
    found = list(explore(function, [f"u{index}" for index in range(count)]))
    assert sum(each.box.volume for each in found) == 1
    return {each.box.intervals: each.result for each in found}


def test_regions_follow_from_comparisons():
    third = Fraction(1, 3)
    assert regions_of(lambda us: us[0] * 3 < 1) == {((0, third),): True, ((third, 1),): False}
    assert regions_of(lambda us: us[0] < 2) == {((0, 1),): True}
    nested = regions_of(lambda us: us[0] < HALF and us[1] < third, 2)
    assert len(nested) == 3
    assert nested[((0, HALF), (0, third))]
    assert regions_of(lambda us: us[0] == HALF) == {((0, 1),): False}
    assert regions_of(lambda us: int(2 - 4 * us[0]))[((0, Fraction(1, 4)),)] == 1


def test_a_function_that_changes_its_mind_is_refused():
    """The second call compares with another number than the first one."""
    calls = []

    def function(us):
        calls.append(1)
        return us[0] < Fraction(1, 1 + len(calls))

    assert any(each.refused for each in explore(function, ["u"]))


@pytest.mark.parametrize(
    "use",
    [
        lambda u: u * u,
        lambda u: 1 / u,
        lambda u: u**2,
        lambda u: float(u),
        lambda u: {u: 1},
        lambda u: math.log(u),
        lambda u: u - ExactNumber(0, 1, type("Other", (), {"name": "v"})()),
    ],
)
def test_uses_of_a_uniform_without_an_exact_result_are_refused(use):
    (found,) = explore(lambda us: use(us[0]), ["u"])
    assert isinstance(found.result, NotExact)
    assert found.refused is not None


def test_exact_tensors_agree_with_torch():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randint(0, 16, (3, 4), generator=generator).double() / 16 for _ in range(2))
    exact_p, exact_q = ExactTensor.of(p), ExactTensor.of(q)
    uses = [
        lambda p, q: (p - q).clamp(min=0, max=0.25),
        lambda p, q: torch.relu(p - q).sum(-1, keepdim=True),
        lambda p, q: torch.minimum(p, q).cumsum(-1),
        lambda p, q: torch.where(p > q, p, 2 * q),
        lambda p, q: torch.maximum(p, q[0]).sum(dim=0),
        lambda p, q: (p > q).nonzero(),
        lambda p, q: p[[0, 2], 1:] * 3 + 1 - q[1, 1],
        lambda p, q: p.argmax(-1),
        lambda p, q: torch.sum(p) / q.max(),
        lambda p, q: p.masked_fill(q > p, 0.5)[torch.tensor(1)],
        lambda p, q: torch.zeros_like(p) + abs(p - q),
        lambda p, q: p.clone().unsqueeze(0).size(-1),
        lambda p, q: (1 - p).min().item(),
    ]
    for use in uses:
        found = use(exact_p, exact_q)
        numbers = found.flatten() if hasattr(found, "tolist") else [found]
        assert list(map(float, numbers)) == torch.as_tensor(use(p, q)).double().flatten().tolist()
    third = ExactTensor.of([Fraction(1, 3)])[0]  # which torch would round
    assert (third * 3, third + 0.5, min(third, 0.25), float(third)) == (1, Fraction(5, 6), 0.25, 1 / 3)
    assert third < math.inf


@pytest.mark.parametrize("name", ["var", "std", "sort", "repeat", "round", "view", "searchsorted", "clip", "take"])
def test_methods_of_numpy_that_differ_are_not_there(name):
    exact = ExactTensor.of([[HALF, HALF]])
    assert not hasattr(exact, name)


# The command


RULES = """
from specsim import AcceptanceRule, Accepted
from specsim.reference.acceptance import rejection

def always(tree, prob_NV, draft_prob_NV, uniforms, final):
    return Accepted(tree.path(len(tree.chain())), 0)

def product(tree, prob_NV, draft_prob_NV, uniforms, final):
    return Accepted([0], int(uniforms[0] * final < 0.5))

right = AcceptanceRule("right", "sampled", rejection)
wrong = AcceptanceRule("wrong", "sampled", always)
unknown = AcceptanceRule("unknown", "sampled", product)
other = 3
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "rules_of_a_user.py"
    path.write_text(RULES)
    return str(path)


@pytest.mark.parametrize(("name", "status"), [("right", 0), ("wrong", 1), ("unknown", 2)])
def test_the_command_proves_refutes_or_declines(module, tmp_path, call, name, status):
    exit_status, out, error = call("certify", "--module", f"{module}:{name}", "--json", str(tmp_path / "c.json"))
    assert exit_status == status
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["is_ok"] == (status == 0)
    words = " ".join(out.split())
    assert ("lossless certificates hold" in words) == (status == 0)
    assert ("Counterexample to wrong: on 2 tokens, 1 draft" in words) == (status == 1)
    assert ("multiplies uniforms[0] by final_uniform" in error) == (status == 2)
    assert "Traceback" not in error
    assert bool(result["not_certified"]) == (status == 2)
    assert any(row["counterexample"] for row in result["certificates"]) == (status == 1)


def test_rules_are_found_by_module_and_name(module):
    assert [each.name for each in load_rules(module)] == ["right", "wrong", "unknown"]
    assert [each.name for each in load_rules(f"{module}:wrong")] == ["wrong"]


@pytest.mark.parametrize(
    "place", ["{}:other", "{}:nothing", "nothing.py", "json", "{}.py:right", "no.such:rule", ":", ""]
)
def test_a_place_without_a_rule_is_refused(module, place):
    with pytest.raises(InputError, check=lambda error: error.name == "module"):
        load_rules(place.format(module))


@pytest.mark.parametrize("arguments", [["--verifier", "block"], ["--impl", "fast"], ["--device", "cpu"]])
def test_options_of_the_packages_verifiers_are_refused(module, arguments, call):
    status, _, error = call("certify", "--module", module, *arguments)
    assert (status, f"{arguments[0].strip('-')} is " in error) == (2, True)
