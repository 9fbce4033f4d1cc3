"""Figures of an acceptance record follow from its counts, and impossible counts are refused."""

import math

import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.core.metrics import acceptance
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts

ROUNDS = [3, 0, 1, 3, 2, 0, 3]


def record(*counts: Counts, **others) -> AcceptanceRecord:
    return AcceptanceRecord.of_counts(counts, "a file", "a tool", "as it counts.", **others)


def test_figures_are_those_of_the_rounds():
    found = record(Counts.of_rounds(ROUNDS, 3))
    expected = acceptance(ROUNDS, 3, 4)
    assert found.accept_length == expected.accept_length
    assert found.rates == expected.accepted_by_position
    assert found.conditional == pytest.approx(expected.conditional_by_position)
    assert found.rounds == len(ROUNDS)
    assert found.config == SpecConfig(1, 3, 4)


def test_a_histogram_counts_the_same_rounds():
    rounds = Counts.of_rounds(ROUNDS, 3)
    assert Counts.of_histogram([2, 1, 1, 3]) == Counts(7, 12, rounds.by_position)
    assert Counts.of_histogram([2, 1], 3) == Counts(3, 1, (1, 0, 0))
    assert rounds.reached == rounds.default_reached


def test_requests_are_pooled_by_their_rounds():
    parts = [Counts.of_rounds([3, 1], 3), Counts.of_rounds([0, 0, 2], 3), Counts(0, 0)]
    assert Counts.pooled(parts) == Counts.of_rounds([3, 1, 0, 0, 2], 3)
    assert record(*parts).accept_length == 1 + 6 / 5
    assert Counts.pooled([Counts(4, 2), Counts.of_histogram([1, 1])]) == Counts(6, 3)


def test_conditional_rates_count_only_proposed_drafts():
    found = record(Counts.of_rounds([2, 1, 1, 0], 2, proposed=[2, 1, 2, 0]))
    assert found.total == Counts(3, 4, (3, 1), (3, 2), undrafted=1)
    assert found.rates == (1.0, 1 / 3)
    assert found.conditional == (1.0, 1 / 2)


def test_a_position_that_no_round_reaches_has_no_rate():
    found = record(Counts.of_rounds([0, 0], 2))
    assert found.rates == (0.0, 0.0)
    assert found.conditional[0] == 0.0
    assert math.isnan(found.conditional[1])
    assert found.to_json()["positions"][1]["conditional"] is None


@pytest.mark.parametrize(
    ("setting", "is_chain", "config"),
    [
        (dict(topk=1, num_steps=3), True, SpecConfig(1, 3, 4)),
        (dict(num_steps=3, num_draft_tokens=4), True, SpecConfig(1, 3, 4)),
        (dict(num_steps=3, num_draft_tokens=16), False, None),
        (dict(topk=4, num_steps=3, num_draft_tokens=16), False, SpecConfig(4, 3, 16)),
        (dict(topk=4, num_steps=3), False, None),
        (dict(), True, None),
    ],
)
def test_a_setting_is_a_chain_unless_something_says_otherwise(setting, is_chain, config):
    found = AcceptanceRecord("a file", "a tool", "as it counts.", 2.0, **setting)
    assert (found.is_chain, found.config) == (is_chain, config)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Counts(-1, 0), "rounds"),
        (lambda: Counts(3, 4, (1, 3)), "by_position"),
        (lambda: Counts(3, 4, (4,)), "by_position"),
        (lambda: Counts(3, 4, (2, 1)), "accepted_drafts"),
        (lambda: Counts(3, 3, (2, 1), (3, 0)), "reached"),
        (lambda: Counts.of_histogram([2, -1]), "histogram"),
        (lambda: record(Counts(0, 0)), "acceptance"),
        (lambda: AcceptanceRecord("", "", "", 0.5), "accept_length"),
        (lambda: AcceptanceRecord("", "", "", 2.0, topk=0), "topk"),
        (lambda: AcceptanceRecord("", "", "", 2.0, rates=(0.5, 0.6)), "rates"),
        (lambda: AcceptanceRecord("", "", "", 2.0, rates=(1.5,)), "rates"),
    ],
)
def test_what_cannot_be_counted_is_refused(make, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        make()


def test_a_notebook_shows_a_row_per_position():
    found = record(Counts.of_rounds(ROUNDS, 3), pair="a <pair>")._repr_html_()
    assert "a &lt;pair&gt; · a tool · a file: 2.71 tokens a round" in found
    assert found.count("<tr>") == 4
    assert "<tr><td>2</td><td>0.571</td><td>0.800</td></tr>" in found
    assert "<tr>" not in AcceptanceRecord("a file", "a tool", "as it counts.", 2.0)._repr_html_()
