"""Examples outside the package: a drafter and an acceptance rule of a user."""

from dataclasses import replace
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from specsim import SamplingParams, SpecConfig, generate, load
from specsim.cli.main import main
from specsim.core.token_drafter import TreeLimits
from specsim.core.user_module import load_module, load_object
from specsim.correctness import exact
from specsim.correctness.exact import Certificates, certify_rules, load_rules
from specsim.correctness.exact.cases import CHAIN as EXACT_CHAIN
from specsim.correctness.exact.cases import PAPER, RULE_CASES
from specsim.correctness.exact.rule_distribution import rule_distribution
from specsim.reference.acceptance import rejection

EXAMPLES = Path(__file__).parents[2] / "notebooks" / "examples"
DRAFTER = f"{EXAMPLES / 'ngram_drafter.py'}:NgramDrafter"
RULE = str(EXAMPLES / "my_rule.py")
FLY = str(EXAMPLES / "fly_rule.py")
PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n"
CHAIN = SpecConfig(topk=1, num_steps=4)


def drafts_of(tokens, depth=3, nodes=8):
    return load_object(DRAFTER, "drafter", "").propose(0, tokens, TreeLimits(depth, nodes, 1))


def test_the_drafter_finds_the_longest_and_latest_suffix():
    assert drafts_of([1, 2, 3, 9, 2, 3]).tokens == [9, 2, 3]
    assert drafts_of([1, 2, 7, 1, 2, 8, 1, 2]).tokens == [8, 1, 2]  # the later of two
    assert drafts_of([5, 1, 2, 6, 4, 2, 7, 5, 1, 2]).tokens == [6, 4, 2]  # the longer one
    assert drafts_of([4, 4]).tokens == [4]
    proposal = drafts_of([1, 2, 3, 1], nodes=2)
    assert (proposal.tokens, proposal.parents, len(proposal.scores)) == ([2, 3], [-1, 0], 2)
    for tokens in ([1], [1, 2, 3]):
        assert [len(part) for part in drafts_of(tokens)] == [0, 0, 0]


def test_the_drafter_changes_no_greedy_token():
    pair = load(drafter=DRAFTER)
    sampling = SamplingParams(max_new_tokens=32)
    mine = generate(pair, PROMPT, CHAIN, sampling)
    assert mine.outputs[0].token_ids == generate(pair, PROMPT, SpecConfig.plain(), sampling).outputs[0].token_ids
    assert mine.metrics["accept_length"] > 1.2


@cache
def certified(name: str) -> Certificates:
    return certify_rules(load_rules(f"{RULE}:{name}"))


def test_the_rule_is_proved_and_its_variant_refuted():
    proved = certified("rule")
    assert (proved.failures, proved.not_certified) == ((), ())
    assert {row.total_variation for row in proved.rows} == {0}
    refuted = certified("broken")
    assert refuted.failures
    assert refuted.not_certified == ()
    assert any(row.counterexample for row in refuted.rows)


def test_k_seq_reaches_its_guaranteed_share_of_the_optimum():
    """1 - (1 - 1/k)^k of it, for k siblings of the root (arXiv 2310.15141)."""
    rows = {row.case: row for row in certified("rule").rows}
    checked = [(case, len(case.parents) - 1) for case in RULE_CASES["siblings"] if set(case.parents[1:]) == {0}]
    assert {count for _, count in checked} == {1, 2, 3}
    for case, count in checked:
        assert rows[case.name].accepted >= (1 - (1 - Fraction(1, count)) ** count) * rows[case.name].optimum
    assert any(rows[case.name].accepted < rows[case.name].optimum for case, _ in checked)


@pytest.mark.parametrize(("name", "status"), [("rule", 0), ("broken", 1)])
def test_the_command_of_the_rules_docstring(name, status, monkeypatch, capsys):
    module = load_module(RULE)
    assert f"specsim certify --module notebooks/examples/my_rule.py:{name}" in module.__doc__
    (expected,) = load_rules(f"{RULE}:{name}")
    rules = []
    monkeypatch.setattr(exact, "certify_rules", lambda loaded, progress: rules.extend(loaded) or certified(name))
    with pytest.raises(SystemExit, check=lambda error: error.code == status):
        main(["certify", "--module", f"{RULE}:{name}"])
    assert [rule.name for rule in rules] == [expected.name]
    assert ("Counterexample" in capsys.readouterr().out) == bool(status)


def test_the_rule_runs_on_the_shipped_pair():
    (rule,) = load_rules(f"{RULE}:rule")
    config = SpecConfig(topk=3, num_steps=2, verifier="multi_round")
    found = generate("tiny", PROMPT, config, SamplingParams(temperature=0.7, max_new_tokens=24), verifier=rule)
    assert len(found.outputs[0].token_ids) == 24
    assert found.metrics["accept_length"] > 1
    assert found.to_json()["acceptance"] == {"synthetic": False, "rule": "K-SEQ"}


def test_the_distance_of_fly_by_hand():
    """p = (1/3, 2/3) and q = (2/3, 1/3): a first draft 0 passes with 1/2, the second draft with 2/3.

    The first token is 0 with 2/3 · (1/2 + 1/2 · 2/3) = 5/9 instead of 1/3; any later one has the target's distribution.
    """
    (rule,) = load_rules(FLY)
    found = rule_distribution(rule, PAPER).exact
    assert (found.total_variation(PAPER), found.accepted) == (Fraction(2, 9), Fraction(14, 9))


@pytest.mark.parametrize(("name", "value"), [("THRESHOLD", 1.1), ("WINDOW", 3)])
def test_fly_that_overrides_nothing_is_rejection(name, value, monkeypatch):
    """No entropy of three probabilities is above ln 3, and no window is as long as the chain."""
    (rule,) = load_rules(FLY)
    monkeypatch.setitem(rule.accept.__globals__, name, value)
    found = rule_distribution(rule, EXACT_CHAIN).exact
    assert found == rule_distribution(replace(rule, accept=rejection), EXACT_CHAIN).exact
    assert found.total_variation(EXACT_CHAIN) == 0


def test_examples_are_short():
    for path, most in (("ngram_drafter.py", 40), ("my_rule.py", 65), ("fly_rule.py", 65)):
        assert len((EXAMPLES / path).read_text().splitlines()) <= most
