"""Generated texts of the guide: protocol, combinations and acceptance of drafters, cells of grids, counted faults."""

from itertools import product

import pytest

from specsim.core.engine_options import GRAPHS
from specsim.core.kinds import OWN
from specsim.core.verifiers import VERIFIERS
from specsim.correctness.differential.drafter_grid import KINDS as GRID_KINDS
from specsim.correctness.differential.drafter_grid import is_possible
from specsim.correctness.differential.grids import GRIDS
from specsim.correctness.differential.pairs import make_pair
from specsim.maintain import counts, drafter_tables, tables, target_tables
from specsim.maintain.drafter_tables import COMBINATIONS, DRAFTERS, OTHERS, Combination, allowed_rows, refused_rows
from specsim.models.shipped import TINY

GUIDE = tables.ROOT / "notebooks" / "guide"
GENERATED = {
    "drafters.md": {
        "protocol": drafter_tables.protocol,
        "acceptance": drafter_tables.acceptance,
        "combinations": drafter_tables.combinations,
        "targets": target_tables.targets,
    },
    "differential.md": {"cells": counts.cells},
    "fault-catalogue.md": {"catalogue": counts.catalogue},
}


@pytest.fixture(scope="module")
def pairs():
    return drafter_tables.make_pairs()


@pytest.mark.parametrize(("page", "mark"), [(page, mark) for page, marks in GENERATED.items() for mark in marks])
def test_the_guide_shows_what_the_code_says(page, mark):
    _, _, rest = (GUIDE / page).read_text(encoding="utf-8").partition(f"<!-- {mark} -->\n")
    assert rest.partition(f"<!-- /{mark} -->")[0] == GENERATED[page][mark]()


def test_every_combination_is_tried_once():
    assert len(set(COMBINATIONS)) == len(COMBINATIONS) == len(DRAFTERS) * len(VERIFIERS) * 2 * len(GRAPHS)


def test_other_settings_of_the_table_are_all_refused(pairs):
    assert [each for each in OTHERS if drafter_tables.refusal(each, pairs[each.drafter]) is None] == []


@pytest.mark.parametrize("kind", DRAFTERS)
def test_both_implementations_allow_the_same(kind, pairs):
    launched = [each for each in COMBINATIONS if each.drafter == kind and each.graph == "eager"]
    errors = [
        [str(drafter_tables.refusal(each, pairs[kind], impl)) for each in launched] for impl in ("fast", "reference")
    ]
    assert errors[0] == errors[1]
    assert "None" in errors[0]


@pytest.mark.parametrize(("kind", "topk"), [*product(GRID_KINDS, (1, 4))])
def test_the_grid_of_drafters_has_what_is_allowed(kind, topk, pairs):
    num_steps = 3
    pair = pairs.get(kind) or make_pair(f"{kind}-llama")
    for verifier, graph, release in product(VERIFIERS, GRAPHS, ("finish", "round")):
        combination = Combination(kind, verifier, topk, graph, num_steps, release)
        possible = is_possible({"kind": kind, "verifier": verifier, "topk": topk, "graph": graph, "release": release})
        assert possible == (drafter_tables.refusal(combination, pair) is None), combination


def test_equal_combinations_share_a_row():
    two = [Combination(kind, "typical", 4, graph) for kind in ("mtp", OWN.title) for graph in ("step", "phase")]
    assert list(allowed_rows([*two, Combination("none", "gumbel", 1, "eager", 0)])) == [
        (f"mtp, {OWN.title}", "tree", "typical", "step, phase"),
        ("none", "no drafts", "gumbel", "eager"),
    ]


def test_errors_with_other_values_share_a_row(pairs):
    refused = [Combination("ngram", verifier, 1, "eager") for verifier in ("block", "gumbel")]
    errors = {each: drafter_tables.refusal(each, pairs["ngram"]) for each in refused}
    ((kinds, sentence),) = refused_rows(errors)
    assert kinds == "ngram"
    assert sentence == str(errors[refused[0]])


def test_the_table_of_acceptance_has_chains_of_three(tmp_path):
    text = (TINY / "acceptance.json").read_text(encoding="utf-8")
    file = tmp_path / "acceptance.json"
    file.write_text(text.replace('"topk": 1', '"topk": 2'), encoding="utf-8")
    assert "| eagle3 | 0 | held-out |" in drafter_tables.acceptance()
    assert "| eagle3 |" not in drafter_tables.acceptance(file=file)


def test_every_grid_is_described():
    assert tuple(counts.CONTENTS) == GRIDS
