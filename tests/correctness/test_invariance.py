"""Differences between a request and its solo run are reported, and no injected one passes."""

import math

import pytest
import torch

import specsim.correctness.invariance.solo
from specsim import SamplingParams, SpecConfig
from specsim.correctness.differential.result import CellResult
from specsim.correctness.invariance.solo import (
    BUDGETS,
    SoloResult,
    SoloRuns,
    check_request,
    difference,
    is_within_rounding_error,
    run_solo,
)
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.requests import make_request

PAIR = synthetic_pair()
CONFIG = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4)
BUDGET = BUDGETS[torch.float64]


def ended(**changes):
    """Make a request with the result of its solo run and some changes, and the solo result."""
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3)
    request = make_request(PAIR.target.config, None, 7, [5, 17, 3], params)
    output = run_solo(PAIR, CONFIG, request)
    request.token_ids, request.logprobs = list(output.token_ids), list(output.logprobs)
    request.accepted, request.finish_reason = list(output.num_accepted_tokens_per_round), output.finish_reason
    for name, change in changes.items():
        setattr(request, name, change(getattr(request, name)))
    return request, output


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"token_ids": lambda ids: [*ids[:-1], ids[-1] ^ 1]}, "token_ids is"),
        ({"token_ids": lambda ids: ids[:-1]}, "token_ids is"),
        ({"accepted": lambda counts: [*counts, 1]}, "accepted is"),
        ({"finish_reason": lambda reason: "stop"}, "finish_reason is stop, solo length"),
        ({"logprobs": lambda values: [values[0] - 2 * BUDGET, *values[1:]]}, "logprob 0 is"),
        ({"logprobs": lambda values: [*values[:-1], math.nan]}, "logprob 5 is nan"),
        ({"logprobs": lambda values: [values[0], math.nan, *values[2:]]}, "logprob 1 is nan"),
        ({"logprobs": lambda values: values[:1]}, "1 logprobs of 6 tokens"),
    ],
)
def test_every_difference_is_named(changes, named):
    assert named in difference(*ended(**changes), BUDGET)


def test_equal_and_aborted_requests_have_no_difference():
    cut = dict(token_ids=lambda ids: ids[:3], logprobs=lambda values: values[:3], accepted=lambda counts: counts[:1])
    aborted = {"finish_reason": lambda reason: "abort"}
    for changes in ({}, {"logprobs": lambda values: [value + BUDGET / 2 for value in values]}, {**cut, **aborted}):
        assert difference(*ended(**changes), BUDGET) is None
    wrong = {**cut, "token_ids": lambda ids: [ids[0], ids[1] ^ 1, ids[2]]}
    assert "token_ids is" in difference(*ended(**wrong, **aborted), BUDGET)


def test_solo_output_depends_on_the_request_id():
    request, output = ended()
    request.request_id = 8
    assert run_solo(PAIR, CONFIG, request).token_ids != output.token_ids
    request = make_request(PAIR.target.config, None, 5, [5, 17, 3], SamplingParams(max_new_tokens=4))
    assert not is_within_rounding_error(PAIR, CONFIG, request)


@pytest.mark.parametrize(("count", "dtype"), [(0, torch.float32), (1, torch.float32), (2, torch.float64)])
def test_rounding_verdicts_follow_the_differential(monkeypatch, count, dtype):
    request, asked = ended()[0], []

    def check(cell, **how):
        asked.append((cell, how))
        return CellResult(cell.id, within_rounding_error=count)

    monkeypatch.setattr(specsim.correctness.invariance.solo, "check", check)
    assert is_within_rounding_error(PAIR, CONFIG, request, dtype) == (count > 0)
    ((cell, how),) = asked
    assert (cell.prompts, cell.request_ids, cell.sampling) == (((5, 17, 3),), (7,), (request.params,))
    assert (cell.config, cell.rounds) == (CONFIG, 6)
    assert how == {"impl": "reference", "dtype": str(dtype).removeprefix("torch."), "pair": PAIR}


OTHER = {
    "token_ids": lambda ids: [*ids[:-1], ids[-1] ^ 1],
    "accepted": lambda counts: [*counts, 1],
    "finish_reason": lambda reason: "stop",
}
NO_DECISION = {
    "a larger error": lambda values: [value + 1 for value in values],
    "no number": lambda values: [math.nan, *values[1:]],
    "too few": lambda values: values[:-1],
}


def judged(dtype, **changes) -> SoloResult:
    return check_request(PAIR, CONFIG, *ended(**changes), dtype)


@pytest.mark.parametrize("dtype", BUDGETS)
def test_equal_requests_are_equal_whatever_the_rounding(monkeypatch, dtype):
    monkeypatch.setattr(
        specsim.correctness.invariance.solo, "is_within_rounding_error", lambda *_: pytest.fail("not needed")
    )
    assert judged(dtype) == SoloResult("equal")
    assert judged(dtype, logprobs=lambda values: [value + BUDGETS[dtype] / 2 for value in values]).verdict == "equal"


@pytest.mark.parametrize("is_close", [True, False])
@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("name", OTHER)
def test_only_a_decision_in_float32_is_excused(monkeypatch, name, dtype, is_close):
    monkeypatch.setattr(specsim.correctness.invariance.solo, "is_within_rounding_error", lambda *_: is_close)
    found = judged(dtype, **{name: OTHER[name]})
    assert found.verdict == ("within rounding error" if is_close and dtype == torch.float32 else "different")
    assert f"request 7: {name} is" in found.difference


@pytest.mark.parametrize("dtype", BUDGETS)
@pytest.mark.parametrize("change", NO_DECISION.values(), ids=list(NO_DECISION))
def test_wrong_logprobs_are_never_excused(monkeypatch, change, dtype):
    monkeypatch.setattr(specsim.correctness.invariance.solo, "is_within_rounding_error", lambda *_: True)
    found = judged(dtype, logprobs=change)
    assert found.verdict == "different"
    assert "logprob" in found.difference


def test_a_comparison_counts_results_and_keeps_the_largest_error(monkeypatch):
    """It is the largest of the equal requests, in either direction."""
    excuses = iter((True, False))
    monkeypatch.setattr(specsim.correctness.invariance.solo, "is_within_rounding_error", lambda *_: next(excuses))
    below, above = ({"logprobs": lambda values, by=by: [values[0] + by, *values[1:]]} for by in (-3e-5, 1e-5))
    wrong = {"token_ids": OTHER["token_ids"]}
    changes = (below, above, wrong, wrong, {"logprobs": NO_DECISION["a larger error"]})
    runs = SoloRuns(PAIR, CONFIG, torch.float32)
    comparison = runs.compare([ended(**change)[0] for change in changes])
    assert (comparison.num_compared, comparison.num_equal, runs.num_solo) == (5, 2, 1)
    assert (comparison.within_rounding_error, len(comparison.differences)) == ((7,), 2)
    assert comparison.max_logprob_error == pytest.approx(3e-5, rel=1e-3)
