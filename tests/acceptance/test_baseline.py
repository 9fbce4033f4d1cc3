"""A loss of accept length beyond the tolerance is found, chance is not, and impossible comparisons are refused."""

from dataclasses import replace

import numpy as np
import pytest

from specsim.acceptance.baseline import compare
from specsim.core.errors import InputError
from specsim.simulator.acceptance_record import AcceptanceRecord, Counts

ROUNDS = 30


def record(seed: int, rate: float, number: int = 60, prompts: str = "", **others) -> AcceptanceRecord:
    """Requests of a chain of 2, each with a rate of its own around the given one."""
    rng = np.random.default_rng(seed)
    counts = []
    for _ in range(number):
        own = np.clip(rate + rng.normal(0, 0.1), 0, 1)
        counts.append(Counts.of_rounds(rng.binomial(2, own, ROUNDS).tolist(), 2))
    known = {"topk": 1, "num_steps": 2, "is_by_request": True, "prompts": prompts}
    return AcceptanceRecord.of_counts(counts, "a file", "a tool", "as it counts.", **known | others)


def test_a_large_loss_is_a_regression():
    found = compare(record(1, 0.4), record(2, 0.6))
    assert found.is_regression
    assert found.is_decided
    assert found.ratio == pytest.approx(1.8 / 2.2, rel=0.03)
    assert str(found).startswith("Regression: accept length 1.")


def test_chance_is_seldom_called_a_regression():
    """At equal rates one of 20 comparisons is one by chance; 8 of 50 have probability 0.004."""
    found = [compare(record(2 * seed, 0.6, 30), record(2 * seed + 1, 0.6, 30), 0.0) for seed in range(50)]
    assert sum(each.is_regression for each in found) < 8


def test_a_loss_within_the_tolerance_is_none():
    assert not compare(record(1, 0.59), record(2, 0.6), 0.05).is_regression
    gain = compare(record(1, 0.7), record(2, 0.6))
    assert (gain.is_regression, gain.is_decided) == (False, True)
    assert str(gain).startswith("No regression")


def test_few_requests_decide_nothing():
    found = compare(record(1, 0.57, 4), record(2, 0.6, 4))
    assert not found.is_decided
    assert str(found).startswith("Undecided, counted as no regression")


def test_equal_prompts_are_paired():
    """The same requests, each with one accepted draft fewer: pairs find what independent requests do not."""
    before = record(1, 0.6, prompts="digest")
    lower = [
        Counts.of_histogram([each.rounds - each.by_position[0] + 1, each.by_position[0] - each.by_position[1] - 1,
                             each.by_position[1]])
        for each in before.counts
    ]  # fmt: skip
    known = {"topk": 1, "num_steps": 2, "is_by_request": True}
    after = AcceptanceRecord.of_counts(lower, "a file", "a tool", "as it counts.", **known, prompts="digest")
    paired = compare(after, before, 0.01)
    assert paired.interval.method == "bootstrap over 60 pairs of requests"
    assert paired.is_regression
    assert not compare(replace(after, prompts=""), before, 0.01).is_regression


def test_the_same_record_is_no_regression_at_all():
    found = compare(record(1, 0.6, prompts="digest"), record(1, 0.6, prompts="digest"), 0.0)
    assert (found.interval.low, found.interval.high, found.is_regression) == (1.0, 1.0, False)


def test_counters_of_a_server_are_compared_by_rounds():
    server = replace(record(1, 0.6), counts=(record(1, 0.6).total,), is_by_request=False)
    found = compare(record(2, 0.4), server)
    assert found.is_regression
    assert found.interval.method == "rounds taken as independent"


@pytest.mark.parametrize(
    ("changes", "tolerance", "name"),
    [
        ({"num_steps": 3}, 0.02, "baseline"),
        ({"topk": 2}, 0.02, "baseline"),
        ({"temperature": 1.0}, 0.02, "baseline"),
        ({"counts": ()}, 0.02, "baseline"),
        ({}, 1.0, "tolerance"),
        ({}, -0.1, "tolerance"),
    ],
)
def test_comparisons_without_sense_are_refused(changes, tolerance, name):
    ours = record(1, 0.6, 3, temperature=0.0)
    with pytest.raises(InputError, check=lambda error: error.name == name):
        compare(ours, replace(ours, **changes), tolerance)
