"""Table of targets, drafters, graph modes and number formats of KV: complete, and the same for both implementations."""

import pytest

from specsim.core import target
from specsim.core.engine_options import GRAPHS
from specsim.core.kv_buffer import KV_DTYPES
from specsim.maintain import target_tables
from specsim.maintain.drafter_tables import DRAFTERS
from specsim.maintain.target_tables import COMBINATIONS, TargetCombination, allowed_rows, refused_rows


@pytest.fixture(scope="module")
def errors():
    return target_tables.refusals()


def test_every_combination_is_tried_once(errors):
    assert len(COMBINATIONS) == len(target.FAMILIES) * len(DRAFTERS) * len(GRAPHS) * len(KV_DTYPES) ** 2
    assert tuple(errors) == COMBINATIONS


def test_every_family_and_drafter_is_allowed_or_refused_in_words(errors):
    allowed = list(allowed_rows([each for each, error in errors.items() if error is None]))
    refused = list(refused_rows(errors))
    shown = {(family, drafter) for families, drafters, *_ in allowed for family in _families(families)
             for drafter in drafters.split(", ")}  # fmt: skip
    every = {(family, kind) for family in target.FAMILIES for kind in DRAFTERS}
    assert every - shown == {("deepseek_v3", "frozen-kv")}
    assert next(row for row in refused if row[0] == "deepseek_v3")[1] == "frozen-kv"


def _families(names):
    return target.FAMILIES if names == "all" else names.split(", ")


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_both_implementations_allow_the_same(family, errors):
    for each in COMBINATIONS:
        if each.family == family and each.graph == "eager":
            error = target_tables.refusal(each, target_tables.make_pair(family, each.drafter), "reference")
            assert str(error) == str(errors[each])


def test_equal_combinations_share_a_row():
    made = [
        TargetCombination(family, drafter, graph, "model", "model")
        for family in target.FAMILIES
        for drafter in ("eagle", "mtp")
        for graph in ("step", "round")
    ]
    assert list(allowed_rows(made)) == [("all", "eagle, mtp", "step, round", "model and model")]
    (row,) = allowed_rows(made[:2])
    assert row == ("llama", "eagle", "step, round", "model and model")
