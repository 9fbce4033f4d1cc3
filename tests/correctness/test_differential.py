"""The differential test passes correct runs: the reference, rounding, and the fast implementation."""

from dataclasses import replace

import pytest
import torch

from specsim.correctness.differential import check, grid
from specsim.correctness.differential.cell import cell_of
from specsim.correctness.differential.grids import QUICK, SAMPLED, SHIPPED, SPECIAL
from specsim.correctness.differential.lockstep import _same_bits
from specsim.correctness.differential.oracle import compare_with_oracle
from specsim.correctness.differential.pairs import make_pair

pytestmark = pytest.mark.usefixtures("budgets_once")
CELL = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3))
WARM = cell_of(dict(topk=4, num_steps=3, num_draft_tokens=8, page_size=4, batch=3, sampling="warm", kind="eagle3"))
COVERING = grid("pairwise")
# The pairwise grid in full is a step of .ci/run.
FEW = {cell.id: cell for cell in map(cell_of, (*QUICK[::4], *SPECIAL[::8], *SAMPLED[::4], *SHIPPED[::6]))}


@pytest.mark.parametrize("cell", COVERING[::32], ids=lambda cell: cell.id)
def test_the_reference_equals_itself(cell):
    result = check(cell, "reference")
    assert (result.mismatches, result.within_rounding_error, result.first_divergence) == (0, 0, None)
    assert not result.is_empty
    assert result.not_compared == {}


@pytest.mark.parametrize("cell", [CELL, WARM, cell_of(QUICK[7]), cell_of(QUICK[2])], ids=lambda cell: cell.id)
def test_bfloat16_rounds_choices_and_gives_no_mismatch(cell):
    """Requests that rounding to 16 bits changes are not compared further, and are counted."""
    result = check(cell, "reference", "bfloat16")
    assert result.mismatches == 0
    assert result.within_rounding_error > 0
    assert sum(result.not_compared.values()) >= result.within_rounding_error
    assert not result.is_empty


@pytest.mark.parametrize("name", [*FEW, "a peaked drafter"])
def test_fast_equals_reference(name, request):
    """Runs on the GPU if there is one."""
    result = check(FEW[name] if name in FEW else request.getfixturevalue("peaked"))
    assert (result.mismatches, result.first_divergence) == (0, None)
    assert not result.is_empty
    assert result.within_rounding_error <= 1


@pytest.mark.parametrize("mode", ["lockstep", "free"])
@pytest.mark.parametrize("graph", ["eager", "round"])
def test_requests_that_diverged_by_rounding_are_realigned(near_twins, mode, graph):
    result = check(replace(near_twins, mode=mode, graph=graph, rounds=6), "reference")
    assert (result.mismatches, result.first_divergence) == (0, None)
    assert result.within_rounding_error > 0
    assert sum(result.not_compared.values()) >= result.within_rounding_error
    assert result.coverage["rounds"] > 3


@pytest.mark.parametrize(
    ("verifier", "topk"),
    [
        *((name, 4) for name in ("target_only", "typical", "multi_round", "traversal", "recursive")),
        *((name, 1) for name in ("rejection", "block")),
    ],
)
def test_the_oracle_sees_what_implementations_share(verifier, topk, monkeypatch):
    """Both implementations draw from the same wrong stream; the oracle draws from the right one."""
    from specsim.core import uniforms as shared
    from specsim.core.uniforms import Stream, named_uniforms

    cell = cell_of(
        dict(topk=topk, num_steps=3, page_size=4, batch=3, sampling="warm", kind="eagle3", verifier=verifier)
    )
    pair = make_pair(cell.pair)
    assert compare_with_oracle(cell, pair) == []
    monkeypatch.setattr(
        shared, "final_uniforms", lambda *names: named_uniforms(*names[:2], Stream.PREFILL, names[2], 0)
    )
    assert {each.phase for each in compare_with_oracle(cell, pair)} == {"oracle against reference"}


def test_a_state_overwritten_with_equal_values_is_detected():
    zeros = torch.zeros(2)
    assert not _same_bits(zeros, torch.tensor([0.0, torch.nan]))
    assert _same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
