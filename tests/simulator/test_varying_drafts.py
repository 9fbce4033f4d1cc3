"""Full rounds derived from counters of rounds that proposed 1 to K drafts, against rates that are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.simulator.acceptance_record import AcceptanceRecord, Counts
from specsim.simulator.record_shares import setting_acceptance, setting_source
from specsim.simulator.varying_drafts import full_rounds

SHARE = st.floats(0.05, 1)


@st.composite
def servers(draw) -> tuple[list[float], list[float]]:
    """Draw rates of full rounds, and the share of rounds that propose each draft."""
    depth = draw(st.integers(1, 7))
    rates, shares = [1.0], [1.0]
    for _ in range(depth):
        rates.append(rates[-1] * draw(SHARE))
        shares.append(shares[-1] * draw(SHARE))
    return rates[1:], [1.0, *shares[2:]]


@given(servers())
def test_the_true_accept_length_lies_within_the_bounds(server):
    rates, shares = server
    found = full_rounds([rate * share for rate, share in zip(rates, shares, strict=True)], sum(shares))
    assert found.low - 1e-9 <= 1 + sum(rates) <= found.high + 1e-9
    assert found.low - 1e-9 <= 1 + sum(found.rates) <= found.high + 1e-9
    assert list(found.rates) == sorted(found.rates, reverse=True)


def test_rounds_of_one_or_all_drafts_are_solved():
    rates = (0.84, 0.68, 0.59)
    assert full_rounds((0.84, 0.68 / 2, 0.59 / 2), 2).rates == pytest.approx(rates)
    assert full_rounds(rates, 3) == pytest.approx((pytest.approx(rates), 3.11, 3.11), abs=0.01)


@pytest.mark.parametrize("mean_drafts", [1.0, 0.5])
def test_rounds_of_one_draft_say_nothing_of_others(mean_drafts):
    assert full_rounds((0.8, 0.0, 0.0), mean_drafts) == ((0.8,), 1.8, 1.8)


def test_a_schedule_is_no_measurement_of_all_drafts():
    """A server of 222 rounds with 456 drafts: 2.58 tokens a round, but not for 3 drafts in every round."""
    counts = Counts(222, 351, (187, 88, 76))
    found = AcceptanceRecord.of_counts([counts], "a page", "vllm", "as it counts.", topk=1, proposed_drafts=456)
    acceptance = setting_acceptance(found, found.config)
    assert sum(acceptance.by_position) == pytest.approx(2.24, abs=0.01)
    assert "from 2.58 at 2.05 drafts a round" in setting_source(found, found.config)


def test_rounds_without_drafts_slow_a_simulated_server():
    counts = Counts.of_rounds([2, 0, 1, 0], 2, proposed=[2, 0, 2, 0])
    found = AcceptanceRecord.of_counts([counts], "a file", "specsim", "as it counts.", topk=1)
    assert found.accept_length == 2.5
    assert setting_acceptance(found, found.config).by_position == (0.5, 0.25)
    assert "over all rounds, 2 of them without drafts" in setting_source(found, found.config)
