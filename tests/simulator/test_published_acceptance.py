"""Published acceptance rates are reproduced, and ranks give the published tree from the published chain."""

import numpy as np
import pytest
from scipy.optimize import brentq

from specsim import SpecConfig
from specsim.simulator.cell import Cell
from specsim.simulator.continuation import continued
from specsim.simulator.record_shares import DEPTH, PublishedAcceptance, published_acceptance


@pytest.mark.parametrize(
    ("model", "lengths"),
    [
        ("llama-3.1-8b", {1: 1.73, 2: 2.25, 3: 2.60}),
        ("qwen3-8b", {1: 1.65, 2: 2.05, 3: 2.25}),
        ("gpt-oss-20b", {1: 1.72, 2: 2.23, 3: 2.55}),
        ("llama-2-70b", {1: 1.73, 2: 2.25, 3: 2.60}),  # unknown with EAGLE-3: that of Llama-3.1-8B
    ],
)
def test_chains_have_the_published_accept_lengths(model, lengths):
    cell = Cell(model=model, shares=published_acceptance("eagle3", model).shares)
    for steps, length in lengths.items():
        assert cell.option(SpecConfig(1, steps, steps + 1)).accept_length == pytest.approx(length)


@pytest.mark.parametrize(
    ("drafter", "lengths"), [("eagle", {2: 2.10, 3: 2.29, 4: 2.39, 5: 2.43}), ("mtp", {1: 1.7617, 8: 4.4966})]
)
def test_every_drafter_has_figures_of_its_own(drafter, lengths):
    cell = Cell(drafter=drafter, shares=published_acceptance(drafter, "qwen3-4b").shares)
    for steps, length in lengths.items():
        assert cell.option(SpecConfig(1, steps, steps + 1)).accept_length == pytest.approx(length, abs=1e-3)


def test_the_default_pair_is_the_default_of_cells():
    assert Cell().shares == published_acceptance("eagle3", "llama-3.1-8b").shares
    assert published_acceptance("no drafter", "no model").pair == "Llama-3.1-8B with EAGLE-3"


def test_drafts_beyond_the_published_follow_the_smoothed_rule():
    rates = (0.8, 0.4, 0.1)
    found = PublishedAcceptance("a pair", rates, "a source").conditional
    assert np.cumprod(found) == pytest.approx(continued(rates, DEPTH))
    assert found[:3] == pytest.approx((0.8, 0.5, 0.25))
    assert all(later < 0.25 for later in found[3:])
    assert len(PublishedAcceptance("a pair", (0.9,) * 12, "a source").conditional) == DEPTH


def test_lower_ranks_share_what_the_best_draft_misses():
    for best, *others in published_acceptance("eagle3", "llama-3.1-8b").shares:
        missed = 1 - best
        assert [share / missed for share in others] == pytest.approx([0.112 / 0.44, 0.125, 0.075, 0.02 / 0.44])


def test_a_published_chain_becomes_its_published_tree():
    """EAGLE on Llama-2-7B, MT-bench. Accept length 3.0 with a chain of 5 drafts, 3.62 with a tree of 25 in 5 depths."""
    best = brentq(lambda rate: sum(rate**depth for depth in range(6)) - 3.0, 0, 1)
    cell = Cell(shares=PublishedAcceptance("a pair", (best,), "a source").shares)
    assert cell.option(SpecConfig(1, 5, 6)).accept_length == pytest.approx(3.0)
    assert cell.option(SpecConfig(4, 5, 26)).accept_length == pytest.approx(3.62, abs=0.02)
