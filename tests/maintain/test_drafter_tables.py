"""Generated texts of the guide: protocol, combinations and acceptance of drafters, cells of grids, counted faults."""

import json
from itertools import product

import pytest

from specsim.core import target
from specsim.core.engine_options import GRAPHS
from specsim.core.kinds import OWN
from specsim.core.kv_buffer import KV_DTYPES
from specsim.core.verifiers import DEFAULT_VERIFIER, VERIFIERS
from specsim.correctness.differential.drafter_grid import KINDS as GRID_KINDS
from specsim.correctness.differential.drafter_grid import is_possible
from specsim.correctness.differential.grids import GRIDS
from specsim.correctness.differential.pairs import make_pair
from specsim.maintain import drafter_tables, kv_acceptance, tables
from specsim.maintain.drafter_tables import (
    COMBINATIONS,
    DRAFTERS,
    OTHERS,
    TARGET_COMBINATIONS,
    Combination,
    allowed_rows,
    refusal,
    refused_rows,
    target_rows,
)
from specsim.maintain.kv_acceptance import CONFIGS, FILE, FORMATS, measured
from specsim.models.shipped import TINY


@pytest.fixture(scope="module")
def target_errors():
    return {combination: refusal(combination) for combination in TARGET_COMBINATIONS}


def test_every_combination_is_tried_once():
    assert len(set(COMBINATIONS)) == len(COMBINATIONS) == len(DRAFTERS) * len(VERIFIERS) * 2 * len(GRAPHS)


def test_other_settings_of_the_table_are_all_refused():
    assert [each for each in OTHERS if refusal(each) is None] == []


@pytest.mark.parametrize("kind", DRAFTERS)
def test_both_implementations_allow_the_same(kind):
    launched = [each for each in COMBINATIONS if each.drafter == kind and each.graph == "eager"]
    errors = [[str(refusal(each, impl=impl)) for each in launched] for impl in ("fast", "reference")]
    assert errors[0] == errors[1]
    assert "None" in errors[0]


@pytest.mark.parametrize(("kind", "topk"), [*product(GRID_KINDS, (1, 4))])
def test_the_grid_of_drafters_has_what_is_allowed(kind, topk):
    num_steps = 3
    pair = None if kind in DRAFTERS else make_pair(f"{kind}-llama")
    for verifier, graph, release in product(VERIFIERS, GRAPHS, ("finish", "round")):
        combination = Combination(kind, verifier, topk, graph, num_steps, release)
        possible = is_possible({"kind": kind, "verifier": verifier, "topk": topk, "graph": graph, "release": release})
        assert possible == (refusal(combination, pair) is None), combination


def test_equal_combinations_share_a_row():
    two = [Combination(kind, "typical", 4, graph) for kind in ("mtp", OWN.title) for graph in ("step", "phase")]
    assert list(allowed_rows([*two, Combination("none", "gumbel", 1, "eager", 0)])) == [
        (f"mtp, {OWN.title}", "tree", "typical", "step, phase"),
        ("none", "no drafts", "gumbel", "eager"),
    ]


def test_errors_with_other_values_share_a_row():
    refused = [Combination("ngram", verifier, 1, "eager") for verifier in ("block", "gumbel")]
    errors = {each: refusal(each) for each in refused}
    (row,) = refused_rows(errors)
    assert row.drafters == "ngram"
    assert row.sentence == str(errors[refused[0]])


def test_the_table_of_acceptance_has_chains_of_three(tmp_path):
    text = (TINY / "acceptance.json").read_text(encoding="utf-8")
    file = tmp_path / "acceptance.json"
    file.write_text(text.replace('"topk": 1', '"topk": 2'), encoding="utf-8")
    assert "| eagle3 | 0 | held-out |" in drafter_tables.acceptance()
    assert "| eagle3 |" not in drafter_tables.acceptance(file=file)


def test_every_grid_is_described():
    assert tuple(tables.CONTENTS) == GRIDS


def test_every_combination_of_a_target_is_tried_once(target_errors):
    assert len(set(TARGET_COMBINATIONS)) == len(target.FAMILIES) * len(DRAFTERS) * len(GRAPHS) * len(KV_DTYPES) ** 2
    assert tuple(target_errors) == TARGET_COMBINATIONS


def test_every_family_and_drafter_is_allowed_or_refused_in_words(target_errors):
    allowed = list(target_rows([each for each, error in target_errors.items() if error is None]))
    refused = list(refused_rows(target_errors))
    shown = {(family, drafter) for families, drafters, *_ in allowed for family in _families(families)
             for drafter in drafters.split(", ")}  # fmt: skip
    every = {(family, kind) for family in target.FAMILIES for kind in DRAFTERS}
    assert every - shown == {("deepseek_v3", "frozen-kv")}
    assert next(row for row in refused if row.families == "deepseek_v3").drafters == "frozen-kv"


def _families(names):
    return target.FAMILIES if names == "all" else names.split(", ")


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_both_implementations_allow_the_same_targets(family, target_errors):
    for each in TARGET_COMBINATIONS:
        if each.family == family and each.graph == "eager":
            error = refusal(each, impl="reference")
            assert str(error) == str(target_errors[each])


def test_equal_combinations_of_targets_share_a_row():
    made = [
        Combination(drafter, DEFAULT_VERIFIER, 1, graph, family=family)
        for family in target.FAMILIES
        for drafter in ("eagle", "mtp")
        for graph in ("step", "round")
    ]
    assert list(target_rows(made)) == [("all", "eagle, mtp", "step, round", "model and model")]
    (row,) = target_rows(made[:2])
    assert row == ("llama", "eagle", "step, round", "model and model")


def kept_rows():
    return json.loads(FILE.read_text(encoding="utf-8"))


def test_every_format_is_kept_with_every_tree():
    rows = {(row["kv_dtype"], row["draft_kv_dtype"], row["topk"]) for row in kept_rows()}
    assert rows == {(*formats, config.topk) for formats in FORMATS for config in CONFIGS}
    assert len({(row["prompts"], len(row["counts"])) for row in kept_rows()}) == 1


@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[-1]], ids=["model", "fp8"])
def test_the_first_prompts_have_the_kept_counts(formats):
    kept = next(row for row in kept_rows() if (row["kv_dtype"], row["draft_kv_dtype"]) == formats)
    again = measured(CONFIGS[0], *formats, count=3)
    assert [[each.rounds, each.accepted_drafts] for each in again.counts] == kept["counts"][:3]


def test_the_table_has_a_line_for_every_format(tmp_path):
    lines = [line for line in kv_acceptance.table().splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len(FORMATS)
    assert lines[1].startswith("| model | model | ")
