"""The differential of block drafters, which draft a tree or lanes from the slots of one forward."""

from functools import cache

import pytest

from specsim.correctness.differential import CellResult, check, grid
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.grids import DRAFTERS, OWN_KV, SAMPLED

KINDS = ("dflash", "dspark")
CELLS = {"tree": OWN_KV[0], "rejection": OWN_KV[1], "released": OWN_KV[2], "block": SAMPLED[1], "lanes": SAMPLED[3]}


@cache
def result(kind: str, name: str) -> CellResult:
    return check(cell_of(CELLS[name] | {"kind": kind}))


@pytest.mark.every_value
@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_implementations_and_the_oracle_agree(kind, name):
    found = result(kind, name)
    assert found.first_divergence is None
    assert not found.is_empty


@pytest.mark.parametrize("kind", KINDS)
def test_enough_is_decided_and_accepted(kind):
    found = [result(kind, name) for name in CELLS]
    drafts = sum(accepted * each.coverage.get(f"accepted {accepted}", 0) for each in found for accepted in range(6))
    assert sum(each.decisions for each in found) >= 200
    assert drafts >= 15
    cut = sum(each.coverage.get("blocks cut", 0) for each in found)
    assert (cut > 0) == (kind == "dspark")


def test_the_grid_has_block_drafters_in_every_graph_mode():
    settings = [each for each in DRAFTERS if each.get("kind") in KINDS]
    assert {each["kind"] for each in settings} == {*KINDS}
    assert {each.get("graph", "eager") for each in settings} == {"eager", "step", "phase", "round"}
    ids = {cell.id for cell in grid("drafters")}
    assert {cell_of(each).id for each in settings} <= ids
    assert {cell.pair.partition("-")[0] for cell in grid("drafters", "bfloat16")} >= {*KINDS}
