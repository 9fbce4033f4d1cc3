"""What parts a request from itself alone is told, and nothing that should part them passes."""

import math
from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.invariance import BUDGETS, alone, difference, is_undecidable
from specsim.requests import make_request
from specsim.zoo.agreeing import agreeing_pair

PAIR = agreeing_pair()
CONFIG = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4)
BUDGET = BUDGETS[torch.float64]


def ended(**changes):
    """A request that holds just what it gives alone, but for changes, and that."""
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3)
    request = make_request(PAIR.target.config, None, 7, [5, 17, 3], params, 512)
    output = alone(PAIR, CONFIG, request)
    request.token_ids, request.logprobs = list(output.token_ids), list(output.logprobs)
    request.accepted, request.finish_reason = list(output.num_accepted_tokens_per_round), output.finish_reason
    for name, change in changes.items():
        setattr(request, name, change(getattr(request, name)))
    return request, output


def test_a_request_that_gave_the_same_has_no_difference():
    assert difference(*ended(), BUDGET) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"token_ids": lambda ids: [*ids[:-1], ids[-1] ^ 1]}, "token_ids is"),
        ({"token_ids": lambda ids: ids[:-1]}, "token_ids is"),
        ({"accepted": lambda counts: [*counts, 1]}, "accepted is"),
        ({"finish_reason": lambda reason: "stop"}, "finish_reason is stop, alone length"),
        ({"logprobs": lambda values: [values[0] - 2 * BUDGET, *values[1:]]}, "logprob 0 is"),
        ({"logprobs": lambda values: [*values[:-1], math.nan]}, "logprob 5 is nan"),
        ({"logprobs": lambda values: [values[0], math.nan, *values[2:]]}, "logprob 1 is nan"),
        ({"logprobs": lambda values: values[:1]}, "1 logprobs of 6 tokens"),
    ],
)
def test_whatever_differs_is_told(changes, told):
    assert told in difference(*ended(**changes), BUDGET)


def test_a_logprob_within_the_budget_is_the_same():
    assert difference(*ended(logprobs=lambda values: [value + BUDGET / 2 for value in values]), BUDGET) is None


def test_an_aborted_request_is_compared_as_far_as_it_came():
    cut = dict(token_ids=lambda ids: ids[:3], logprobs=lambda values: values[:3], accepted=lambda counts: counts[:1])
    aborted = {"finish_reason": lambda reason: "abort"}
    assert difference(*ended(**cut, **aborted), BUDGET) is None
    wrong = {**cut, "token_ids": lambda ids: [ids[0], ids[1] ^ 1, ids[2]]}
    assert "token_ids is" in difference(*ended(**wrong, **aborted), BUDGET)


def test_what_a_request_gives_alone_depends_on_its_id():
    request, output = ended()
    request.request_id = 8
    assert alone(PAIR, CONFIG, request).token_ids != output.token_ids


def test_what_lies_within_rounding_cannot_be_called_and_clear_decisions_can():
    """Every odd row of the head is the even one before it, a unit in the last place away: all logits nearly tie."""
    request = make_request(PAIR.target.config, None, 0, [5, 17, 3], SamplingParams(max_new_tokens=4), 512)
    head = PAIR.target.tensors["lm_head.weight"].float()
    head[1::2] = head[::2] * (1 + 2**-23)
    near = replace(PAIR, target=replace(PAIR.target, tensors={**PAIR.target.tensors, "lm_head.weight": head}))
    assert not is_undecidable(PAIR, CONFIG, request)
    assert is_undecidable(near, CONFIG, request)
