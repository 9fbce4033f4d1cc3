import math
from dataclasses import astuple
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specsim.core.errors import InputError
from specsim.core.files import without_nan
from specsim.core.metrics import (
    accept_length_from_eagle_tau,
    accept_length_from_rate,
    accept_length_from_tensorrt_llm,
    acceptance,
    distinct_share,
    is_loop,
    latency,
)

# Five rounds of three drafts that accept 0, 3, 1, 3 and 2 of them.
ROUNDS = [0, 3, 1, 3, 2]


def test_figures_of_five_rounds_by_hand():
    figures = acceptance(ROUNDS, num_steps=3, num_draft_tokens=8)
    assert figures.rounds == 5
    assert figures.accept_length == pytest.approx(14 / 5)  # 9 drafts and 5 bonus tokens
    assert figures.accept_rate == pytest.approx(9 / 15)  # three steps a round
    assert figures.node_rate == pytest.approx(9 / 35)  # seven drafts a round
    assert figures.accepted_by_position == pytest.approx((4 / 5, 3 / 5, 2 / 5))
    assert figures.conditional_by_position == pytest.approx((4 / 5, 3 / 4, 2 / 3))


def test_rounds_without_drafts_are_left_out():
    """Equal counts read as 1.85 of all rounds and 2.22 of those with drafts, which vLLM counts."""
    figures = acceptance([0, 3, 0, 1, 0], num_steps=3, num_draft_tokens=4, proposed_depths=[3, 3, 0, 2, 0])
    assert (figures.rounds, figures.undrafted_rounds) == (3, 2)
    assert figures.accept_length == pytest.approx(1 + 4 / 3)
    assert (figures.accept_rate, figures.node_rate) == (4 / 8, 4 / 15)
    assert figures.accepted_by_position == pytest.approx((2 / 3, 1 / 3, 1 / 3))
    assert acceptance([0, 0], 0, 1, [0, 0]).rounds == 2  # plain decoding


@given(st.integers(1, 6).flatmap(lambda s: st.tuples(st.just(s), st.lists(st.integers(0, s), min_size=1))))
def test_length_rate_and_positions_agree_with_each_other(case):
    num_steps, drafts = case
    figures = acceptance(drafts, num_steps, num_steps + 1)
    assert figures.accept_length == pytest.approx(1 + sum(figures.accepted_by_position))
    assert figures.accept_length == pytest.approx(accept_length_from_rate(figures.accept_rate, num_steps))
    assert figures.node_rate == figures.accept_rate, "a chain proposes a draft a step"
    assert list(figures.accepted_by_position) == sorted(figures.accepted_by_position, reverse=True)
    assert 1 <= figures.accept_length <= num_steps + 1


def test_constant_conditional_rate_gives_the_closed_form():
    """The length is (1 - α^(γ+1)) / (1 - α) (arXiv 2211.17192) for exact frequencies.

    Here α is 1/2 and γ is 3.
    """
    figures = acceptance([0] * 8 + [1] * 4 + [2] * 2 + [3] * 2, num_steps=3, num_draft_tokens=4)
    alpha = Fraction(1, 2)
    assert figures.accept_length == float((1 - alpha**4) / (1 - alpha))
    assert figures.conditional_by_position == (0.5, 0.5, 0.5)


def test_published_positions_give_the_published_length():
    """Unconditional rates and accept length of Llama-3.1-8B with EAGLE-3 and three drafts (vllm#32030)."""
    drafts = np.repeat([3, 2, 1, 0], [35, 52 - 35, 73 - 52, 100 - 73])
    figures = acceptance(drafts, num_steps=3, num_draft_tokens=4)
    assert figures.accepted_by_position == pytest.approx((0.73, 0.52, 0.35))
    assert round(figures.accept_length, 1) == 2.6


def test_a_position_never_reached_has_no_conditional_rate():
    figures = acceptance([1, 0], num_steps=3, num_draft_tokens=4)
    assert figures.conditional_by_position[:2] == (0.5, 0.0)
    assert math.isnan(figures.conditional_by_position[2])


def test_no_rounds_have_no_figures():
    figures = acceptance([], num_steps=2, num_draft_tokens=3)
    assert figures.rounds == 0
    numbers = (figures.accept_length, figures.accept_rate, figures.node_rate, *figures.accepted_by_position)
    assert len(numbers) == 5
    assert all(map(math.isnan, numbers))


def test_plain_decoding_has_length_one_and_no_rate():
    figures = acceptance([0, 0], num_steps=0, num_draft_tokens=1)
    assert (figures.accept_length, figures.accepted_by_position) == (1.0, ())
    assert math.isnan(figures.accept_rate)
    assert math.isnan(figures.node_rate)


@pytest.mark.parametrize("drafts", [[-1, 2], [0, 4], [1.9, 2.5], [0, 1.0], [True]])
def test_counts_that_are_not_0_to_num_steps_are_refused(drafts):
    with pytest.raises(ValueError, check=lambda error: type(error) is InputError):
        acceptance(drafts, num_steps=3, num_draft_tokens=4)


def test_tensorrt_llm_leaves_the_bonus_out():
    assert accept_length_from_tensorrt_llm(9 / 5) == pytest.approx(acceptance(ROUNDS, 3, 8).accept_length)


def test_eagle_divides_by_one_round_less():
    tau = (9 + 5) / (5 - 1)
    assert accept_length_from_eagle_tau(tau, rounds=5) == pytest.approx(acceptance(ROUNDS, 3, 8).accept_length)


@pytest.mark.parametrize(("percent", "length"), [(40.7, 2.2209), (39.67, 2.1901)])
def test_vllm_rate_gives_its_published_length(percent, length):
    """GLM-4.7-Flash with three drafts, greedy, one client, before and after vllm#41162.

    The rate is rounded to 1e-4.
    """
    assert accept_length_from_rate(percent / 100, num_steps=3) == pytest.approx(length, abs=3 * 0.5e-4 + 0.5e-4)


@pytest.mark.parametrize(
    ("tokens", "order", "share"),
    [
        ("abcdefg", 4, 1.0),
        ("ababababab", 4, 2 / 7),
        ("aaaaaaaaaa", 4, 1 / 7),
        ("aab", 1, 2 / 3),
        ("abc", 4, 1.0),
        ("", 4, 1.0),
    ],
)
def test_distinct_share_by_hand(tokens, order, share):
    assert distinct_share([ord(token) for token in tokens], order) == pytest.approx(share)


def test_a_text_loops_with_fewer_than_half_of_4_grams_distinct():
    """Texts of 8 and of 9 tokens have four distinct 4-grams."""
    assert not is_loop([0, 1, 2, 3] * 2 + [0, 1, 2])
    assert is_loop([0, 1, 2, 3] * 3)


NONE = (math.nan, math.nan)
LATENCIES = {  # arrival, deliveries, and (steps, seconds) of TTFT, TPOT, ITL and the whole request
    "answered in its step": ((3, 0.25), [(3, 0.75, 1)], (1, 0.5), NONE, NONE, (1, 0.5)),
    # Seven tokens in three deliveries: six tokens share the time of four steps, and there are two gaps.
    "several tokens in a delivery": (
        (2, 1.0), [(4, 2.0, 1), (5, 2.5, 4), (7, 5.0, 2)], (3, 1), (3 / 6, 3 / 6), (3 / 2, 3 / 2), (6, 4)
    ),
    "one delivery": ((0, 0.0), [(1, 2.0, 3)], (2, 2), (0, 0), NONE, (2, 2)),
    # One token in each of steps 0 to 2, and after ten preempted steps in 13 and 14.
    "a wait after a preemption": (
        (0, 0.0), [(step, step / 2 + 1, 1) for step in (0, 1, 2, 13, 14)],
        (1, 1), (14 / 4, 7 / 4), (14 / 4, 7 / 4), (15, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arrived", "emissions", "ttft", "tpot", "itl", "e2e"), LATENCIES.values(), ids=LATENCIES)
def test_latency_by_hand(arrived, emissions, ttft, tpot, itl, e2e):
    figures = latency(arrived, emissions)
    named = {"ttft": ttft, "tpot": tpot, "itl": itl, "e2e": e2e}
    for name, expected in named.items():
        found = (getattr(figures, f"{name}_steps"), getattr(figures, f"{name}_seconds"))
        assert found == pytest.approx(expected, rel=0, abs=0, nan_ok=True), name


@pytest.mark.parametrize(("arrived", "emissions"), [(None, []), ((1, 0.5), []), (None, [(1, 0.5, 1)])])
def test_a_request_that_was_never_answered_has_no_latency(arrived, emissions):
    assert [math.isnan(figure) for figure in astuple(latency(arrived, emissions))] == [True] * 8


@pytest.mark.parametrize(
    "emissions",
    [[(0, 2.0, 1)], [(1, 0.5, 1)], *([(2, 2.0, 1), second] for second in ((1, 3.0, 1), (3, 1.5, 1), (3, 3.0, 0))), [3]],
    ids=["step before arrival", "time before arrival", "steps fall", "seconds fall", "no token", "no delivery"],
)
def test_deliveries_out_of_order_or_empty_are_refused(emissions):
    with pytest.raises(InputError, check=lambda error: error.name == "emissions"):
        latency((1, 1.0), emissions)


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 5)), min_size=1),
)
def test_itl_is_at_least_tpot(arrived, waits):
    """A request's figures also add up to its whole time."""
    emissions, (step, seconds) = [], arrived
    for steps, more, tokens in waits:
        step, seconds = step + steps, seconds + more
        emissions.append((step, float(seconds), tokens))
    figures, tokens = latency(arrived, emissions), sum(tokens for *_, tokens in emissions)
    if tokens > 1:
        assert figures.ttft_steps + (tokens - 1) * figures.tpot_steps == pytest.approx(figures.e2e_steps)
        assert figures.ttft_seconds + (tokens - 1) * figures.tpot_seconds == pytest.approx(figures.e2e_seconds)
    if len(emissions) > 1:
        assert figures.itl_steps >= figures.tpot_steps
        assert figures.itl_seconds >= figures.tpot_seconds
        assert figures.ttft_steps + (len(emissions) - 1) * figures.itl_steps == pytest.approx(figures.e2e_steps)


def test_non_finite_numbers_are_null_in_json():
    value = {"a": [1, math.nan, ("x", -math.inf)], "b": {"c": math.inf, "d": None, "e": 0.5}, "f": True}
    assert without_nan(value) == {"a": [1, None, ["x", None]], "b": {"c": None, "d": None, "e": 0.5}, "f": True}
