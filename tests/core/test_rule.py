"""Acceptance rules of a user, and the results that they may return."""

import pytest
import torch

from specsim import AcceptanceRule, Accepted, InputError, SpecConfig
from specsim.core.rule import Tree, check_rule, checked
from specsim.core.verifiers import DRAFTS

# Two siblings, a child of the first, and a dead node.
TREE = Tree([5, 1, 2, 3, 0], [-1, 0, 0, 1, -1], [1, 3, -1, -1, -1], [-1, 2, -1, -1, -1], depth_limit=2)
PROB_NV = torch.full((5, 4), 0.25, dtype=torch.float64)


def rule_that_returns(result, **fields):
    return AcceptanceRule(**dict(name="mine", drafts="best", accept=lambda *_: result) | fields)


@pytest.mark.parametrize(
    ("result", "plain"),
    [
        (([0], 3), Accepted([0], 3)),
        ((torch.tensor([0, 1, 3]), torch.tensor(0)), Accepted([0, 1, 3], 0)),
        (Accepted([0, 2], True), Accepted([0, 2], 1)),
    ],
)
def test_results_become_plain_integers(result, plain):
    found = rule_that_returns(result).walk(TREE, PROB_NV, None, [0.5] * 3, 0.5)
    assert found == plain
    assert {type(value) for value in (*found.path, found.bonus)} == {int}


class Unprintable:
    def __repr__(self):
        raise ValueError


@pytest.mark.parametrize(
    "result",
    [
        *(None, 7, "no", ([0], 0.5), ([0.0], 1), ([0], 1, 2), Unprintable()),  # no path and token
        *(([], 1), ([1], 1), ([0, 3], 1), ([0, 2, 3], 1), ([0, 0], 1), ([0, 4], 1), ([0, 5], 1), ([0, -4], 1)),
        *(([0], 4), ([0], -1)),  # outside the vocabulary
    ],
)
def test_an_impossible_result_is_refused(result):
    with pytest.raises(InputError, check=lambda error: error.name == "the result of rule mine"):
        rule_that_returns(result).walk(TREE, PROB_NV, None, [0.5] * 3, 0.5)


@pytest.mark.parametrize(("limit", "is_allowed"), [(2, True), (1, False), (0, False), (-1, False)])
def test_a_path_ends_at_the_depth_limit(limit, is_allowed):
    tree = Tree(TREE.tokens, TREE.parents, TREE.next_token, TREE.next_sibling, limit)
    if is_allowed:
        assert checked(([0, 1, 3], 0), tree, 4).path == [0, 1, 3]
        return
    assert checked(([0], 0), tree, 4).path == [0]
    with pytest.raises(InputError):
        checked(([0, 1, 3], 0), tree, 4)


def test_dead_nodes_are_no_drafts_of_a_chain():
    tree = Tree([5, 1, 0, 0], [-1, 0, -1, -1], [1, -1, -1, -1], [-1] * 4, depth_limit=9)
    assert list(tree.chain()) == [1]


@pytest.mark.parametrize(
    ("drafts", "config"),
    [
        ("best", SpecConfig()),
        ("sampled", SpecConfig(topk=1, verifier="rejection")),
        ("siblings", SpecConfig(verifier="multi_round")),
        ("distinct", SpecConfig(verifier="recursive")),
    ],
)
def test_a_rule_makes_and_requires_the_setting_of_its_drafts(drafts, config):
    rule = rule_that_returns(None, drafts=drafts)
    assert rule.config() == config
    rule.check_config(config)
    others = [SpecConfig(verifier="typical"), SpecConfig(topk=1, verifier="block")]
    others += [rule_that_returns(None, drafts=each).config() for each in {*DRAFTS} - {drafts}]
    for other in others:
        with pytest.raises(InputError, check=lambda error: error.name == "verifier"):
            rule.check_config(other)


@pytest.mark.parametrize("name", ["threshold_single", "threshold_acc"])
def test_thresholds_that_a_rule_does_not_read_are_refused(name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        rule_that_returns(None).check_config(SpecConfig(**{name: 0.5}))


@pytest.mark.parametrize(
    ("name", "value"), [("name", " "), ("name", 3), ("drafts", "all"), ("accept", "f"), ("lossless", 1)]
)
def test_a_rule_with_a_wrong_field_is_refused(name, value):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        rule_that_returns(None, **{name: value})


def test_a_name_is_no_rule():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("verifier", "rejection")):
        check_rule("rejection")
