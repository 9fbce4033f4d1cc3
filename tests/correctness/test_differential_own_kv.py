"""The differential of drafters other than EAGLE heads: standalone models, frozen KV, blocks and products of drafts."""

from collections import Counter

import pytest

from specsim.correctness.differential import check, grid
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.grids import DRAFTERS, MTP, OWN_KV, OWN_STEPS, P_EAGLE, SAMPLED

OTHER_KV = ("standalone", "standalone.tli", "frozen-kv")
BLOCKS = ("dflash", "dspark")  # which draft a tree or lanes from the slots of one forward
CELLS = dict.fromkeys(OTHER_KV, (*OWN_KV[:3], OWN_KV[4]))
CELLS |= dict.fromkeys(BLOCKS, (*OWN_KV[:3], SAMPLED[1], SAMPLED[3]))
CELLS |= {"mtp": [MTP[index] for index in (0, 5, 11)], "p-eagle": [P_EAGLE[index] for index in (1, 6, 11)]}
MODES = {"standalone.shifted": [OWN_KV[2]], "frozen-kv.next": [OWN_KV[2]], "dflash.causal": [OWN_KV[2]]}
LIMITED = ("eagle3.cut", "eagle3.window", "mtp.cut", "mtp.window", "dspark.cut", "dflash.window")
LEAST_ACCEPTED = dict.fromkeys(BLOCKS, 15) | {"mtp": 10, "p-eagle": 10}
OWN = {"tree of lanes": [OWN_STEPS[7]], "chain of a block": [OWN_STEPS[11]]}


@pytest.mark.by_default(
    "standalone.tli", "dspark", "mtp", "frozen-kv.next", "mtp.cut", "dflash.window"
)  # .ci/run compares all
@pytest.mark.parametrize("name", [*CELLS, *MODES, *LIMITED, *OWN])
def test_the_implementations_and_the_oracle_agree(name):
    """Compare every cell of a kind, in all graph modes; enough is decided, and drafts are accepted."""
    coverage = Counter()
    decisions = 0
    for setting in (CELLS | MODES | OWN | dict.fromkeys(LIMITED, OWN_KV[:3]))[name]:
        found = check(cell_of(setting if name in OWN else setting | {"kind": name}))
        assert found.first_divergence is None
        assert not found.is_empty
        assert found.within_rounding_error == 0 or name.partition(".")[0] in (*BLOCKS, "mtp", "p-eagle")
        coverage.update(found.coverage)
        decisions += found.decisions
    if name in CELLS:
        assert decisions >= 200
        assert sum(count * coverage[f"accepted {count}"] for count in range(6)) >= LEAST_ACCEPTED.get(name, 20)
        assert (coverage["blocks cut"] > 0) == (name == "dspark")


@pytest.mark.parametrize("kinds", [BLOCKS, (*OTHER_KV, *MODES)], ids=["blocks", "other KV"])
def test_the_grid_has_every_graph_family_and_mode(kinds):
    settings = [each for each in DRAFTERS if each.get("kind") in kinds]
    assert {each["kind"] for each in settings} == set(kinds)
    assert {each.get("graph", "eager") for each in settings} == {"eager", "step", "phase", "round"}
    assert {each.get("family", "llama") for each in settings} >= {"llama", "qwen3", "mistral", "noisy"}
    assert {each.get("page_size", 1) for each in settings} == {1, 4, 16}
    assert {cell_of(each).id for each in settings} <= {cell.id for cell in grid("drafters")}
    in_16_bits = {cell.pair.rpartition("-")[0] for cell in grid("drafters", "bfloat16")}
    assert in_16_bits >= set(kinds) - {*MODES}
