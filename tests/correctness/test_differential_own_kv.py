"""The differential of drafters with other KV than EAGLE heads: standalone models, and drafters on frozen KV."""

from functools import cache

import pytest

from specsim.correctness.differential import CellResult, check, grid
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.grids import DRAFTERS, OWN_KV, OWN_STEPS

KINDS = ("standalone", "standalone.tli", "frozen-kv")
CELLS = (0, 1, 2, 4)  # of OWN_KV, in all graph modes


@cache
def result(kind: str, place: int) -> CellResult:
    return check(cell_of(OWN_KV[place] | {"kind": kind}))


@pytest.mark.every_value
@pytest.mark.parametrize("place", CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_implementations_and_the_oracle_agree(kind, place):
    found = result(kind, place)
    assert found.first_divergence is None
    assert not found.is_empty
    assert found.within_rounding_error == 0


@pytest.mark.parametrize("kind", KINDS)
def test_enough_is_decided_and_accepted(kind):
    found = [result(kind, place) for place in CELLS]
    drafts = sum(accepted * each.coverage.get(f"accepted {accepted}", 0) for each in found for accepted in range(6))
    assert sum(each.decisions for each in found) >= 200
    assert drafts >= 20


@pytest.mark.parametrize("kind", ["standalone.shifted", "frozen-kv.next"])
def test_other_modes_agree_too(kind):
    assert check(cell_of(OWN_KV[2] | {"kind": kind})).first_divergence is None


def test_the_grid_has_every_graph_family_and_mode():
    kinds = {*KINDS, "standalone.shifted", "frozen-kv.next"}
    settings = [each for each in DRAFTERS if each.get("kind") in kinds]
    assert {each["kind"] for each in settings} == kinds
    assert {each.get("graph", "eager") for each in settings} == {"eager", "step", "phase", "round"}
    assert {each.get("family", "llama") for each in settings} >= {"llama", "qwen3", "mistral", "noisy"}
    assert {each.get("page_size", 1) for each in settings} == {1, 4, 16}
    ids = {cell.id for cell in grid("drafters")}
    assert {cell_of(each).id for each in settings} <= ids


@pytest.mark.parametrize("place", [7, 11], ids=["tree of lanes", "chain of a block"])
def test_requests_of_own_draft_steps_agree(place):
    found = check(cell_of(OWN_STEPS[place]))
    assert found.first_divergence is None
    assert not found.is_empty
    assert found.within_rounding_error == 0
