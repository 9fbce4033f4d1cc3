"""Whole engines under an acceptance rule of a user: differential and sampling tests."""

import json

import pytest
import torch

from specsim import AcceptanceRule, Accepted, InputError, SamplingParams, SpecConfig
from specsim.correctness.differential.cell import Cell
from specsim.correctness.differential.grid_run import run_grid
from specsim.correctness.statistics import run_sampling_tests
from specsim.reference import acceptance
from specsim.reference.sampling import inverse_cdf

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FILE = """
from specsim import AcceptanceRule, Accepted
from specsim.reference.acceptance import rejection
from specsim.reference.sampling import inverse_cdf

def from_target(tree, prob_NV, draft_prob_NV, uniforms, final):
    path, _ = rejection(tree, prob_NV, draft_prob_NV, uniforms, final)
    return Accepted(path, inverse_cdf(prob_NV[path[-1]], final))

right = AcceptanceRule("right", "sampled", rejection)
wrong = AcceptanceRule("wrong", "sampled", from_target)
"""


@pytest.fixture
def run(tmp_path, call):
    """Run a command; {} stands for the file of rules. Returns exit status, output, error, and what --json wrote."""
    module = tmp_path / "sampled_rules_of_a_user.py"
    module.write_text(FILE)
    written = tmp_path / "out.json"

    def run(words: str) -> tuple[int, str, str, str]:
        result = call(*words.format(module).split(), "--json", str(written))
        return *result, written.read_text() if written.exists() else ""

    return run


def by_precision(_tree, prob_NV, _draft_prob_NV, _uniforms, _final):
    """Choose by something that no rule may read: whether probabilities were computed in float32."""
    is_single = bool((prob_NV[0].float().double() == prob_NV[0]).all())
    return Accepted([0], int(prob_NV[0].argsort()[-1 - is_single]))


def cell(rule, **fields):
    config = SpecConfig(topk=2, num_steps=2, num_draft_tokens=5, page_size=4, **fields)
    sampling = (SamplingParams(temperature=0.8, max_new_tokens=6), SamplingParams(max_new_tokens=6))
    return Cell("one cell", "eagle-llama", ((1, 2, 3), (4, 5)), sampling, config, rounds=2, rule=rule)


@pytest.mark.parametrize(
    ("drafts", "accept", "fields"),
    [
        ("siblings", acceptance.multi_round, {"verifier": "multi_round"}),
        ("best", lambda tree, prob_NV, _, __, final: Accepted([0], inverse_cdf(prob_NV[0], final)), {}),
    ],
)
def test_the_implementations_agree_under_a_rule(drafts, accept, fields):
    rule = AcceptanceRule("mine", drafts, accept)
    found = run_grid("one cell", [cell(rule, **fields)], device=DEVICE)
    assert found.failures() == []
    assert found.cells[0].decisions > 2


def test_a_rule_that_differs_between_engines_is_a_mismatch():
    found = run_grid("one cell", [cell(AcceptanceRule("changing", "best", by_precision))], device=DEVICE)
    assert len(found.failures()) == 1


CHAIN = "--rule {}:right --verifier rejection --topk 1 --temperature 1"


def test_commands_take_a_rule(run):
    status, printed, _, written = run(f"diff {CHAIN} --num-steps 2 --batch 1 --device {DEVICE}")
    assert (status, "The implementations are equal." in printed, "rule right" in written) == (0, True, True)
    status, printed, _, written = run(f"generate {CHAIN} --max-new-tokens 6")
    assert (status, "acceptance rule right" in printed) == (0, True)
    assert json.loads(written)["acceptance"] == {"synthetic": False, "rule": "right"}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("generate --rule {}:right", "verifier"),
        (f"generate {CHAIN.replace(' --temperature 1', '')} --impl fast --device {DEVICE} --graph round", "graph"),
        ("diff --rule {}:right", "verifier"),
        ("diff --rule {}", "rule"),
        ("diff --rule {}:from_target", "rule"),
        ("diff --rule {}:nothing", "rule"),
        ("diff --grid quick --rule {}:right", "rule"),
        ("sampling-test --verifier block --rule {}:right", "verifier"),
        ("sampling-test --rule nothing.py:right", "module"),
    ],
)
def test_bad_places_of_rules_are_refused(run, words, name):
    status, _, error, _ = run(words)
    assert status == 2
    assert error.startswith(f"specsim: {name} is ")


def test_whole_graphs_and_rules_exclude_each_other():
    with pytest.raises(InputError, check=lambda error: error.name == "graph"):
        Cell("", "eagle-llama", ((1,),), (SamplingParams(),), graph="round", rule=RULE)


RULE = AcceptanceRule("mine", "best", lambda *_: Accepted([0], 0))


@pytest.mark.parametrize(("name", "status"), [("right", 0), ("wrong", 1)])
def test_sampling_tests_accept_and_reject_rules(run, name, status):
    exit_status, _, _, written = run(f"sampling-test --rule {{}}:{name} --tokens 4000")
    assert exit_status == status
    rows = json.loads(written)["tests"]
    assert {row["name"] for row in rows} == {name}
    assert any(row["is_rejected"] for row in rows) == bool(status)


def test_a_rule_with_given_drafts_is_sampled_too():
    found = run_sampling_tests(AcceptanceRule("mine", "best", _target_only), tokens=1200)
    assert found.failures == ()
    assert {row.accept_length > 1 for row in found.rows} == {True}


def _target_only(tree, prob_NV, _draft_prob_NV, uniforms, final):
    return acceptance.target_only(tree, prob_NV, uniforms, final, 1.0, 1.0)
