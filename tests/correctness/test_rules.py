"""Whole engines under an acceptance rule of a user: differential and sampling tests."""

import json

import pytest
import torch

from specsim import AcceptanceRule, Accepted, InputError, SamplingParams, SpecConfig
from specsim.cli.main import main
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
def module(tmp_path):
    path = tmp_path / "sampled_rules_of_a_user.py"
    path.write_text(FILE)
    return str(path)


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


def test_the_diff_command_takes_a_rule(module, tmp_path, capsys):
    arguments = ["diff", "--rule", f"{module}:right", "--verifier", "rejection", "--topk", "1", "--num-steps", "2"]
    main_arguments = [*arguments, "--temperature", "1", "--batch", "1", "--device", DEVICE]
    with pytest.raises(SystemExit) as exit_info:
        main([*main_arguments, "--json", str(tmp_path / "d.json")])
    assert exit_info.value.code == 0
    assert "The implementations are equal." in capsys.readouterr().out
    assert "rule right" in (tmp_path / "d.json").read_text()


def test_generate_takes_a_rule(module, tmp_path, capsys):
    file = tmp_path / "g.json"
    given = ["--rule", f"{module}:right", "--verifier", "rejection", "--topk", "1", "--temperature", "1"]
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", *given, "--max-new-tokens", "6", "--json", str(file)])
    assert exit_info.value.code == 0
    assert "acceptance rule right" in capsys.readouterr().out
    assert json.loads(file.read_text())["acceptance"] == {"synthetic": False, "rule": "right"}


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["generate", "--rule", "{}:right"], "verifier"),
        (
            [
                "generate",
                "--rule",
                "{}:right",
                "--verifier",
                "rejection",
                "--topk",
                "1",
                "--impl",
                "fast",
                "--device",
                DEVICE,
                "--graph",
                "round",
            ],
            "graph",
        ),
        (["diff", "--rule", "{}:right"], "verifier"),
        (["diff", "--rule", "{}"], "rule"),
        (["diff", "--rule", "{}:from_target"], "rule"),
        (["diff", "--rule", "{}:nothing"], "rule"),
        (["diff", "--grid", "quick", "--rule", "{}:right"], "rule"),
        (["sampling-test", "--verifier", "block", "--rule", "{}:right"], "verifier"),
        (["sampling-test", "--rule", "nothing.py:right"], "module"),
    ],
)
def test_bad_places_of_rules_are_refused(module, arguments, name, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([each.format(module) for each in arguments])
    assert exit_info.value.code == 2
    assert capsys.readouterr().err.startswith(f"specsim: {name} is ")


def test_whole_graphs_and_rules_exclude_each_other():
    with pytest.raises(InputError, check=lambda error: error.name == "graph"):
        Cell("", "eagle-llama", ((1,),), (SamplingParams(),), graph="round", rule=RULE)


RULE = AcceptanceRule("mine", "best", lambda *_: Accepted([0], 0))


@pytest.mark.parametrize(("name", "status"), [("right", 0), ("wrong", 1)])
def test_sampling_tests_accept_and_reject_rules(module, tmp_path, name, status):
    with pytest.raises(SystemExit) as exit_info:
        main(["sampling-test", "--rule", f"{module}:{name}", "--tokens", "4000", "--json", str(tmp_path / "s.json")])
    assert exit_info.value.code == status
    rows = json.loads((tmp_path / "s.json").read_text())["tests"]
    assert {row["name"] for row in rows} == {name}
    assert any(row["is_rejected"] for row in rows) == bool(status)


def test_a_rule_with_given_drafts_is_sampled_too():
    found = run_sampling_tests(AcceptanceRule("mine", "best", _target_only), tokens=1200)
    assert found.failures == ()
    assert {row.accept_length > 1 for row in found.rows} == {True}


def _target_only(tree, prob_NV, _draft_prob_NV, uniforms, final):
    return acceptance.target_only(tree, prob_NV, uniforms, final, 1.0, 1.0)
