"""Probabilities for plans follow from records, with what is assumed named."""

import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator.acceptance import accept_length
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts
from specsim.simulator.continuation import continued
from specsim.simulator.rank_by_depth import rank_by_depth
from specsim.simulator.record_shares import predicted_interval, ranks, record_shares, setting_acceptance, setting_source

RATES = (0.8, 0.6, 0.4)


def record(length: float = 2.8, **others) -> AcceptanceRecord:
    return AcceptanceRecord("a file", "a tool", "as it counts.", length, **others)


CHAIN = record(topk=1, num_steps=3, rates=RATES)


def test_a_chain_continues_behind_its_rates():
    found = record_shares(CHAIN, 5)
    rates = continued(RATES, 5)
    assert [share for (share,) in found.shares] == pytest.approx(
        [after / before for before, after in zip((1, *rates), rates, strict=False)]
    )
    assert found.num_measured == 3
    assert "accept length 3.2" in found.assumed[-1]


def test_measured_shares_are_taken_as_they_are():
    shares = ((0.7, 0.1), (0.6, 0.2))
    assert record_shares(record(rates=(0.7, 0.42), num_steps=2, topk=1, shares=shares)).shares == shares


def test_a_length_alone_gives_one_conditional_rate():
    found = record_shares(record(1.75, num_steps=2), 2)
    assert [share for (share,) in found.shares] == pytest.approx([0.5, 0.5])
    with pytest.raises(InputError, check=lambda error: error.name == "acceptance"):
        record_shares(record(1.75))


@pytest.mark.parametrize("length", [2.5, 3.7, 6.0])
def test_a_tree_gives_the_best_draft_that_has_its_length(length):
    tree = SpecConfig(4, 5, 16)
    found = record_shares(record(length, topk=4, num_steps=5, num_draft_tokens=16), 5)
    assert accept_length(rank_by_depth(found.shares, tree)) == pytest.approx(length, abs=1e-6)
    assert len(set(found.shares)) == 1
    assert found.shares[0] == ranks(found.shares[0][0])


def test_a_length_that_no_tree_has_is_refused():
    tree = record(1.1, topk=4, num_steps=5, num_draft_tokens=16)
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("accept_length", 1.1)):
        record_shares(tree)


def test_rounds_without_a_proposal_do_not_lower_a_chain():
    counts = (Counts.of_rounds([2, 1, 0, 0], 2, proposed=[2, 2, 0, 0]),)
    found = record_shares(AcceptanceRecord.of_counts(counts, "a file", "a tool", "as it counts.", topk=1), 2)
    assert [share for (share,) in found.shares] == [1.0, 0.5]


def test_the_own_setting_has_its_measured_rates():
    tree = SpecConfig(4, 3, 8)
    own = record(topk=4, num_steps=3, num_draft_tokens=8, rates=RATES)
    assert setting_acceptance(own, tree).by_position == RATES
    assert setting_acceptance(CHAIN, SpecConfig(1, 3, 4)).by_position == RATES
    assert setting_acceptance(CHAIN, SpecConfig(1, 5, 6)).by_position == pytest.approx(continued(RATES, 5))
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("topk", 4)):
        setting_acceptance(CHAIN, tree)


def test_longer_chains_alone_have_an_interval():
    assert predicted_interval(CHAIN, SpecConfig(1, 3, 4)) is None
    assert predicted_interval(CHAIN, SpecConfig(1, 2, 3)) is None
    band = predicted_interval(CHAIN, SpecConfig(1, 5, 6))
    assert band.low < 1 + sum(continued(RATES, 5)) < band.high


def test_the_source_of_a_setting_is_said():
    assert setting_source(CHAIN, SpecConfig(1, 3, 4)) == "Accept length 2.80, as measured: a file (a tool)."
    assert "from 2.80 at 3 steps: a file" in setting_source(CHAIN, SpecConfig(1, 5, 6))
