import functools
import itertools
import math
from dataclasses import fields, replace
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessorList

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch, Sampling
from specsim.correctness.faults.checks.memory import guarded
from specsim.fast import sampling as fast
from specsim.fast.runtime.launch import block_of, kernel
from specsim.fast.vocabulary import distribution, summaries
from specsim.fast.vocabulary.penalties import Logits
from specsim.reference.sampling import adjust_logits, argmax, inverse_cdf, logprob, target_prob, topk

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NO_TOKENS = torch.empty(0, dtype=torch.int64)
LOWEST, HIGHEST = 2.0**-24, 1 - 2.0**-24  # the bounds of specsim.core.uniforms.named_uniforms

coarse_logits = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=9).map(torch.tensor)


def one(vocab_size: int, **params) -> Sampling:
    return Sampling.of([SamplingParams(**params)], vocab_size)


def prob_of(logits, **params) -> torch.Tensor:
    logits_V = torch.as_tensor(logits, dtype=torch.float64)
    return target_prob(logits_V, one(len(logits_V), **params), 0)


def adjusted(logits, context=(), prompt_len=0, allowed=None, **params) -> list[float]:
    logits_V, context = torch.tensor(logits), torch.tensor(context, dtype=torch.int64)
    allowed_V = None if allowed is None else torch.tensor(allowed)
    return adjust_logits(logits_V, context, prompt_len, one(len(logits_V), **params), 0, allowed_V).tolist()


def support(prob_V: torch.Tensor) -> list[int]:
    return prob_V.nonzero().flatten().tolist()


@given(st.lists(st.sampled_from([-math.inf, -1.5, -0.0, 0.0, 1e-30, 2.0, math.inf]), min_size=1), st.data())
def test_topk_is_descending_with_ties_to_the_lower_index(values, data):
    k = data.draw(st.integers(0, len(values)))
    order = sorted(range(len(values)), key=lambda index: (-values[index], index))[:k]
    found, indices = topk(torch.tensor(values), k)
    assert indices.tolist() == order
    assert found.tolist() == torch.tensor(values)[indices].tolist()


def test_topk_and_argmax_work_along_the_last_dimension():
    values = torch.tensor([[[1, 3, 3], [2, 2, 2]], [[5, 4, 6], [0, 0, 1]]])
    assert topk(values, 2)[1].tolist() == [[[1, 2], [0, 1]], [[2, 0], [2, 0]]]
    assert argmax(values).tolist() == [[1, 0], [2, 2]]
    assert argmax(torch.empty(0, 4)).shape == (0,)


FILTERS = [
    dict(temperature=0.7),
    dict(temperature=1.0, top_k=1),
    dict(temperature=1.3, top_k=5),
    dict(temperature=1.0, top_k=500),
    dict(temperature=0.9, top_p=0.8),
    dict(temperature=0.9, top_p=0.01),
    dict(temperature=1.1, min_p=0.1),
    dict(temperature=1.6, top_k=20, top_p=0.7),
    dict(temperature=1.6, top_p=0.7, min_p=0.2),
    dict(temperature=2.0, top_k=30, top_p=0.9, min_p=0.05),
    dict(temperature=0.8, repetition_penalty=1.3, logit_bias={3: 2.5, 40: -4.0}, top_k=12, top_p=0.9, min_p=0.02),
    dict(temperature=1.2, repetition_penalty=0.8),
]


@functools.cache
def transformers_model() -> LlamaForCausalLM:
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes))


def transformers_processors(params: SamplingParams, context_len: int) -> LogitsProcessorList:
    """List the processors that a model's generate() makes of these parameters, in its own order."""
    config = GenerationConfig(
        do_sample=True,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        sequence_bias=[[[token], bias] for token, bias in params.logit_bias.items()] or None,
    )
    return transformers_model()._get_logits_processor(config, input_ids_seq_length=context_len)


@pytest.mark.parametrize("params", FILTERS, ids=lambda params: ",".join(params))
@pytest.mark.parametrize("vocab_size", [97, 256])
def test_distribution_is_that_of_transformers(params, vocab_size):
    """Ten rows of normal logits have no ties and no cut within rounding error.

    The budget is a few float64 roundings. No token of the context has a bias, as there the implementations differ (next
    test).
    """
    given = SamplingParams(**params)
    unbiased = [token for token in range(vocab_size) if token not in given.logit_bias]
    for _ in range(10):
        logits_V = 3 * torch.randn(vocab_size, dtype=torch.float64)
        context = torch.tensor(unbiased)[torch.randint(len(unbiased), (20,))]
        sampling = one(vocab_size, **params)
        ours = target_prob(adjust_logits(logits_V, context, 7, sampling, 0), sampling, 0)
        theirs = transformers_processors(given, len(context))(context[None], logits_V[None])[0].softmax(-1)
        assert support(ours) == support(theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_bias_follows_repetition_unlike_in_transformers():
    """A context token's logit 1 becomes 1 / 2 + 4, in transformers (1 + 4) / 2.

    The bias is 4 and the repetition penalty 2.
    """
    params = dict(temperature=1.0, repetition_penalty=2.0, logit_bias={0: 4.0, 2: 4.0})
    logits, context = [1.0, 1.0, 1.0], torch.tensor([0, 1])
    theirs = transformers_processors(SamplingParams(**params), 2)(context[None], torch.tensor([logits]))
    assert adjusted(logits, context.tolist(), **params) == [4.5, 0.5, 5.0]
    assert theirs.tolist() == [[2.5, 0.5, 5.0]]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (dict(temperature=1, top_p=0.8), [0, 1, 2]),
        (dict(temperature=1, top_k=3, top_p=0.8), [0, 1]),  # 12/14 of what top-k left
        (dict(temperature=1, top_p=0.66, min_p=0.3), [0, 1]),  # after min-p the first token would have 8/12 by itself
        (dict(temperature=1, top_p=0.7), [0, 1]),
        (dict(temperature=2, top_p=0.7), [0, 1, 2]),  # of the distribution at temperature 2
        (dict(temperature=2, min_p=0.4), [0, 1, 2]),
    ],
)
def test_filters_are_applied_in_their_order(params, kept):
    assert support(prob_of(torch.tensor([8, 4, 2, 1, 1]).double().log(), **params)) == kept


@given(coarse_logits, st.integers(0, 10), st.floats(0.05, 1), st.floats(0, 1), st.floats(0.1, 3))
def test_a_distribution_is_a_renormalised_part_of_the_softmax(logits_V, top_k, top_p, min_p, temperature):
    filtered = prob_of(logits_V, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    whole = (logits_V.double() / temperature).softmax(-1)
    kept = filtered > 0
    assert kept.any()
    assert float(filtered.sum()) == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(filtered[kept], whole[kept] / whole[kept].sum(), rtol=1e-12, atol=0)
    assert whole[kept].min() >= whole.masked_fill(kept, 0).max()


@given(coarse_logits, st.integers(1, 9))
def test_top_k_keeps_the_lower_index_of_equals(logits_V, k):
    logits = logits_V.tolist()
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:k]
    assert support(prob_of(logits_V, temperature=1, top_k=k)) == sorted(best)


@pytest.mark.parametrize("size", [4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_top_p_on_equals_keeps_just_enough_of_the_lower_indices(size, tokens):
    """Equal probabilities of 1/4 and 1/8 are exact, and mass that is reached exactly is enough."""
    equal = torch.zeros(size)
    assert support(prob_of(equal, temperature=1, top_p=tokens / size)) == list(range(tokens))
    assert support(prob_of(equal, temperature=1, top_p=math.nextafter(tokens / size, 1))) == list(range(tokens + 1))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 199))
def test_top_p_keeps_the_fewest_tokens_that_reach_p(weights, p_of_199):
    p, total = Fraction(p_of_199, 199), sum(weights)
    assume(total % 199)  # then no sum of probabilities equals p
    sizes = [
        size
        for size in range(1, len(weights) + 1)
        if any(Fraction(sum(some), total) >= p for some in itertools.combinations(weights, size))
    ]
    kept = support(prob_of(torch.tensor(weights).double().log(), temperature=1, top_p=float(p)))
    assert len(kept) == sizes[0]
    assert Fraction(sum(weights[token] for token in kept), total) >= p


def test_min_p_is_relative_to_the_largest_that_remains():
    logits = torch.tensor([4.0, 2.0, 2.0, 1.0]).log()
    assert support(prob_of(logits, temperature=1, min_p=0.49)) == [0, 1, 2]
    assert support(prob_of(logits, temperature=1, min_p=0.51)) == [0]
    assert support(prob_of(logits, temperature=1, min_p=0.24)) == [0, 1, 2, 3]
    assert support(prob_of(torch.zeros(4), temperature=1, min_p=1)) == [0, 1, 2, 3]


@given(coarse_logits, st.integers(0, 4), st.floats(0.1, 1))
def test_temperature_zero_is_one_hot_at_the_lowest_best(logits_V, top_k, top_p):
    logits = logits_V.tolist()
    prob = prob_of(logits_V, temperature=0, top_k=top_k, top_p=top_p).tolist()
    assert prob == [float(token == logits.index(max(logits))) for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_the_smallest_temperatures_approach_greedy(temperature):
    """Every allowed temperature gives a distribution."""
    assert prob_of([1.0, 30.0, -2.0], temperature=temperature).tolist() == [0, 1, 0]


def test_a_huge_temperature_is_uniform():
    torch.testing.assert_close(prob_of([1.0, 30.0, -2.0, 0.0], temperature=1e300), torch.full((4,), 0.25).double())


@pytest.mark.parametrize("temperature", [0, 1])
def test_masked_tokens_have_no_mass(temperature):
    logits = torch.tensor(adjusted([9.0, 1.0, 8.0, 1.0], allowed=[False, True, False, True]))
    prob = prob_of(logits, temperature=temperature)
    assert prob.tolist() == ([0, 1, 0, 0] if temperature == 0 else [0, 0.5, 0, 0.5])


def test_repetition_divides_positive_and_multiplies_negative():
    logits = [2.0, -2.0, 3.0, -3.0, 0.0]
    assert adjusted(logits, [0, 1, 2, 2], prompt_len=2, repetition_penalty=2.0) == [1.0, -4.0, 1.5, -3.0, 0.0]


def test_presence_and_frequency_count_the_output_only():
    context = [0, 0, 1, 2, 2, 2]
    assert adjusted([0.0] * 4, context, prompt_len=2, presence_penalty=0.5) == [0, -0.5, -0.5, 0]
    assert adjusted([0.0] * 4, context, prompt_len=2, frequency_penalty=0.5) == [0, -0.5, -1.5, 0]
    both = adjusted([0.0] * 4, context, prompt_len=2, frequency_penalty=-0.5, presence_penalty=2.0)
    assert both == [0, -1.5, -0.5, 0]


@pytest.mark.parametrize("prompt_len", [3, 9])
def test_a_context_inside_the_prompt_has_no_output(prompt_len):
    assert adjusted([1.0, 2.0], [0, 0, 1], prompt_len, presence_penalty=1.0, frequency_penalty=1.0) == [1.0, 2.0]


def test_penalties_come_before_bias_and_bias_before_the_mask():
    params = dict(repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=0.5, logit_bias={0: -3.0, 2: 7.0})
    after = adjusted([2.0, 2.0, 2.0], [0, 0], 0, allowed=[True, True, False], **params)
    assert after == [2 / 2 - 2 * 0.25 - 0.5 - 3, 2.0, -math.inf]


def test_each_request_has_its_own_parameters():
    sampling = Sampling.of(
        [SamplingParams(), SamplingParams(temperature=1, top_k=1, repetition_penalty=2, logit_bias={0: 5.0})], 3
    )
    logits_V, context = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1])
    assert adjust_logits(logits_V, context, 0, sampling, 0).tolist() == [1, 2, 2]
    assert adjust_logits(logits_V, context, 0, sampling, 1).tolist() == [6, 1, 2]
    assert target_prob(logits_V.double(), sampling, 1).tolist() == [0, 1, 0]


def test_nothing_is_changed_in_place():
    sampling = one(5, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=2, logit_bias={1: 1.0})
    logits_V, context, allowed_V = torch.randn(5).double(), torch.tensor([1, 2, 2]), torch.tensor([True] * 4 + [False])
    inputs = [logits_V, context, allowed_V, *(getattr(sampling, field.name) for field in fields(sampling))]
    before = [tensor.clone() for tensor in inputs]
    prob_V = target_prob(adjust_logits(logits_V, context, 1, sampling, 0, allowed_V), sampling, 0)
    target_prob(logits_V, sampling, 0)
    target_prob(logits_V, one(5, temperature=1), 0).zero_()
    logprob(logits_V, sampling, 0, 1)
    kept = prob_V.clone()
    inverse_cdf(prob_V, 0.3)
    assert torch.equal(prob_V, kept)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize(("temperature", "expected"), [(0, 1 / 5), (1, 1 / 5), (0.5, 1 / 17), (2, 1 / 3)])
def test_logprob_is_at_the_temperature_and_at_1_when_greedy(temperature, expected):
    logits_V = torch.tensor([1.0, 4.0]).double().log()
    sampling = one(2, temperature=temperature, top_k=1, top_p=0.1, min_p=0.9)
    assert logprob(logits_V, sampling, 0, 0) == pytest.approx(math.log(expected))
    assert logprob(logits_V, sampling, 0, 1) == pytest.approx(math.log(1 - expected))


def test_logprob_of_a_masked_token_is_minus_infinity():
    logits_V = torch.tensor(adjusted([1.0, 1.0, 1.0], allowed=[True, False, True]))
    assert logprob(logits_V, one(3), 0, 1) == -math.inf
    assert logprob(logits_V, one(3), 0, 2) == pytest.approx(math.log(1 / 2))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.sampled_from([torch.float32, torch.float64]))
def test_inverse_cdf_spends_the_uniforms_in_proportion(weights, dtype):
    """Uniforms are the midpoints of as many equal cells as there is mass, so each id gets exactly its weight."""
    total = sum(weights)
    assume(total)
    drawn = [inverse_cdf(torch.tensor(weights, dtype=dtype) / 16, (cell + 0.5) / total) for cell in range(total)]
    assert [drawn.count(token) for token in range(len(weights))] == weights
    assert drawn == sorted(drawn)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.25, 2), (0.5, 4), (0.75, 4), (HIGHEST, 4)])
def test_a_uniform_on_a_dyadic_edge_belongs_to_the_next_id(uniform, token):
    assert inverse_cdf(torch.tensor([0, 0.25, 0.25, 0, 0.5]), uniform) == token


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(2.0**-100, 1.0, width=32)), min_size=1, max_size=300),
    st.sampled_from([LOWEST, 0.5, HIGHEST]),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(max_examples=200)
def test_inverse_cdf_returns_an_id_with_mass(weights, uniform, dtype):
    assume(any(weights))
    assert weights[inverse_cdf(torch.tensor(weights, dtype=dtype), uniform)] > 0


def test_an_id_without_mass_is_not_drawn_by_a_parallel_scan(monkeypatch):
    """A parallel scan adds in another order at every id, so its sums may rise where nothing was added."""
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: torch.tensor([0.5, 0.5 + 2.0**-23, 1.0]))
    assert inverse_cdf(torch.tensor([0.5, 0.0, 0.5]), 0.5 + 2.0**-24) == 2


def thirds() -> torch.Tensor:
    return torch.full((3,), 1 / 3)


@pytest.mark.parametrize(
    "weights",
    [
        torch.full((10,), 0.1),  # sums to 1.0000001
        torch.cat([thirds(), torch.zeros(100)]),
        torch.cat([torch.tensor([1 - 2.0**-23]), torch.zeros(5)]),  # sums to less than the highest uniform
        torch.softmax(torch.linspace(0, 80, 50_000), -1),  # most of it too small to move the sum
        torch.softmax(-torch.linspace(0, 80, 50_000), -1),
    ],
    ids=["tenths", "thirds", "short", "rising", "falling"],
)
@pytest.mark.parametrize("uniform", [LOWEST, HIGHEST])
def test_no_uniform_walks_off_the_end(weights, uniform):
    token = inverse_cdf(weights, uniform)
    assert weights[token] > 0
    exact = weights.double().cumsum(-1) / weights.double().sum()
    before = float(exact[token - 1]) if token else 0.0
    budget = len(weights) * 2.0**-24  # of a sum in float32
    assert before - budget <= uniform <= float(exact[token]) + budget


# The fast implementation, as read by the device functions that verification reads it with.


@kernel
def _read(distributions, prob_ptr, logprob_ptr, num_rows, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    tokens = tl.arange(0, BLOCK)[None, :]
    mask, out = (rows < num_rows) & (tokens < distributions.vocab_size), rows * distributions.vocab_size + tokens
    tl.store(logprob_ptr + out, distribution.logprob(distributions, rows + 0 * tokens, tokens, mask), mask=mask)
    rows = tl.minimum(rows, num_rows - 1)  # these know no mask
    prob = distribution.weight(distributions, rows, tokens) / distribution.kept_mass(distributions, rows)
    tl.store(prob_ptr + out, prob, mask=mask)


def make_batch(params: list[SamplingParams], vocab_size: int, rows=None, seq_lens=None, prompt_lens=None) -> Batch:
    every = range(len(params))
    batch = Batch.of(every, rows or every, seq_lens or [3] * len(params), params, vocab_size)
    return replace(batch, prompt_lens=torch.tensor(prompt_lens)) if prompt_lens else batch


def as_left(logits_RV: torch.Tensor, num_requests: int) -> Logits:
    """Make logits that no request changes, with NaN where nothing may read."""
    changed = torch.zeros(num_requests, dtype=torch.int32, device=logits_RV.device)
    return Logits(logits_RV, changed, torch.full_like(logits_RV, torch.nan, dtype=torch.float32))


def distributions_of(
    logits_RV: torch.Tensor, params: list[SamplingParams], device: str = DEVICE
) -> distribution.Distributions:
    """Compute the distributions of rows on the device, the same number of rows for each request."""
    batch = make_batch(params, logits_RV.shape[1]).to(device)
    return fast.distributions(batch, as_left(logits_RV.to(device), len(params)))


def read(made: distribution.Distributions) -> tuple[torch.Tensor, torch.Tensor]:
    """Read (probabilities, logprobs) of every token."""
    (num_rows, vocab_size), device = made.logits.raw.shape, made.moments.device
    prob_RV, logprob_RV = torch.empty(2, num_rows, vocab_size, device=device)
    block = triton.next_power_of_2(vocab_size)
    rows = block_of(num_rows, 1, block)
    _read[(triton.cdiv(num_rows, rows),)](made.tables, prob_RV, logprob_RV, num_rows, ROWS=rows, BLOCK=block)
    return prob_RV.cpu(), logprob_RV.cpu()


def fast_prob(logits, **params) -> torch.Tensor:
    return read(distributions_of(torch.as_tensor(logits)[None], [SamplingParams(**params)]))[0][0]


def assert_within_rounding(prob_V: torch.Tensor, exact_V: torch.Tensor):
    """Compare tokens exactly, and probabilities within roundings of an exponent, an exp2 and a sum."""
    assert support(prob_V) == support(exact_V)
    kept = exact_V > 0
    budget = 2.0**-22 * (8 - exact_V[kept].log())
    assert ((prob_V[kept].double() / exact_V[kept] - 1).abs() <= budget).all()


def is_decidable(logits_V: torch.Tensor, margin: float = 1e-5, **params) -> bool:
    """Check whether top-p and min-p cut further than `margin` from every token's own mass."""
    kept = topk(prob_of(logits_V, **params | dict(top_p=1.0, min_p=0.0)), len(logits_V))[0]
    before, ratio = kept.cumsum(-1) - kept, kept / kept[0]
    by_mass = params["top_p"] == 1 or ((before - params["top_p"]).abs() > margin)[kept > 0].all()
    return bool(by_mass and (params["min_p"] == 0 or ((ratio - params["min_p"]).abs() > margin).all()))


@pytest.mark.parametrize("vocab_size", [1, 97, 4096, 4099])
def test_fast_distributions_are_the_references(vocab_size, device, program_order):
    """One launch has every filter, for three rows of each request.

    is_decidable excludes cuts within rounding error.
    """
    every = [SamplingParams(**params | dict(logit_bias={})) for params in [*FILTERS, dict()]]
    logits_RV = 3 * torch.randn(3 * len(every), vocab_size)
    prob_RV, logprob_RV = read(distributions_of(logits_RV, every, device))
    for row, (logits_V, prob_V, logprob_V) in enumerate(zip(logits_RV, prob_RV, logprob_RV, strict=True)):
        params = every[row // 3]
        filters = dict(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
        assert params.temperature == 0 or is_decidable(logits_V, 1e-6, **filters)
        assert_within_rounding(prob_V, prob_of(logits_V, **filters))
        exact = torch.log_softmax(logits_V.double() / (params.temperature or 1), -1)
        assert ((logprob_V - exact).abs() <= 2.0**-22 * (8 - exact)).all()


def test_fast_distributions_cut_ties_as_the_reference(device):
    """400 rows of nine coarse logits each have their own filters."""
    num_rows, temperatures = 400, torch.tensor([0.3, 1.0, 1.7])
    logits_RV = torch.randint(-8, 9, (num_rows, 9)) / 4
    columns = {
        "temperature": temperatures[torch.randint(3, (num_rows,))],
        "top_k": torch.randint(11, (num_rows,)),
        "top_p": torch.randint(1, 65, (num_rows,)) / 64,
        "min_p": torch.randint(40, (num_rows,)) / 64,
    }
    every = [
        dict(zip(columns, row, strict=True)) for row in zip(*(each.tolist() for each in columns.values()), strict=True)
    ]
    prob_RV, _ = read(distributions_of(logits_RV, [SamplingParams(**params) for params in every], device))
    decidable = [row for row in range(num_rows) if is_decidable(logits_RV[row], **every[row])]
    assert len(decidable) > 0.95 * num_rows
    for row in decidable:
        assert_within_rounding(prob_RV[row], prob_of(logits_RV[row], **every[row]))


BINARY = dict(temperature=math.log2(math.e))  # makes the weights of integer logits powers of two: nothing is rounded
CUTS = [  # and how many of the weights 8 4 2 1 1 they keep
    (dict(top_p=0.75), 2),
    (dict(top_p=0.75 + 2.0**-24), 3),
    (dict(top_p=0.5), 1),
    (dict(top_p=2.0**-40), 1),
    (dict(top_p=math.ulp(0)), 1),
    (dict(top_p=0.9375), 4),
    (dict(top_p=0.94), 5),
    (dict(top_p=1 - 2.0**-53), 5),
    (dict(top_k=4), 4),
    (dict(top_k=3, top_p=6 / 7 + 1e-6), 3),  # of the 14/16 that top-k left
    (dict(top_k=3, top_p=0.85), 2),
    (dict(top_k=4, top_p=0.99), 4),  # a tie that both filters may cut
    (dict(min_p=0.25), 3),
    (dict(min_p=0.25 + 2.0**-24), 2),
    (dict(top_k=4, min_p=0.125), 4),
    (dict(min_p=1.0), 1),
    (dict(top_p=0.75, min_p=0.3), 2),
    (dict(), 5),
]


def test_fast_distributions_of_powers_of_two_are_cut_exactly(device):
    weights_RV = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]).repeat(len(CUTS), 1)
    prob_RV, _ = read(
        distributions_of(weights_RV.log2(), [SamplingParams(**BINARY, **params) for params, _ in CUTS], device)
    )
    for weights_V, prob_V, (params, kept) in zip(weights_RV, prob_RV, CUTS, strict=True):
        weights_V[kept:] = 0
        assert torch.equal(prob_V, weights_V / weights_V.sum()), params


@pytest.mark.parametrize("size", [4, 8])
def test_fast_top_p_on_equals_keeps_the_lower_indices(size, device):
    cuts = [(tokens / size + more, tokens + bool(more)) for tokens in range(1, size) for more in (0, 2.0**-24)]
    equal_RV = torch.zeros(len(cuts), size)
    equal_RV[:, 1::2] = -0.0
    prob_RV, _ = read(distributions_of(equal_RV, [SamplingParams(temperature=1, top_p=p) for p, _ in cuts], device))
    assert [support(prob_V) for prob_V in prob_RV] == [list(range(tokens)) for _, tokens in cuts]


def test_fast_distributions_of_extreme_temperatures():
    logits = torch.tensor([1.0, 30.0, -2.0, 30.0])
    assert fast_prob(logits, temperature=0).tolist() == [0, 1, 0, 0]
    assert fast_prob(logits, temperature=math.ulp(0)).tolist() == [0, 0.5, 0, 0.5]
    assert fast_prob([-1e18, 1e18, 0.0], temperature=math.ulp(0)).tolist() == [0, 1, 0]
    assert fast_prob(logits, temperature=1e300).tolist() == [0.25] * 4
    assert fast_prob(torch.tensor([-torch.inf, 1.0]), temperature=1e300).tolist() == [0, 1]


@pytest.mark.parametrize("integers", [True, False])
def test_fast_distributions_do_not_depend_on_block_sizes(integers, device, program_order, monkeypatch):
    """One row a program gives the same bits.

    Groups of 16 tokens give the same cuts and bits of exact sums.
    """
    every = [SamplingParams(), *(SamplingParams(**FILTERS[chosen]) for chosen in (0, 2, 9))]
    if integers:
        every = [replace(params, **BINARY) for params in every]
    logits_RV = 3 * torch.randn(len(every), 97)
    logits_RV = logits_RV.round() if integers else logits_RV
    whole = distributions_of(logits_RV, every, device)
    for module in (fast, summaries):
        monkeypatch.setattr(module, "block_of", lambda count, on_gpu, others=1: on_gpu)
    by_row = distributions_of(logits_RV, every, device)
    assert torch.equal(by_row.moments, whole.moments)
    assert torch.equal(by_row.lasts, whole.lasts)
    monkeypatch.setattr(summaries, "GROUP", 16)
    monkeypatch.setattr(fast, "GROUP", 16)
    by_group = distributions_of(logits_RV, every, device)
    assert torch.equal(by_group.lasts, whole.lasts)
    torch.testing.assert_close(by_group.moments, whole.moments, rtol=0, atol=0 if integers else 2.0**-18)


def test_fast_distributions_are_the_same_with_a_gpus_searches(device, monkeypatch):
    """Rows have two values, and more tokens count than a list can hold.

    No sum of their weights is rounded.
    """
    every = [SamplingParams(**BINARY, **params) for params in (dict(top_k=4000), dict(top_p=0.9), dict(top_p=0.999))]
    logits_RV = torch.randint(2, (len(every), 4352)).float()
    made = distributions_of(logits_RV, every, device)
    monkeypatch.setattr(fast, "INTERPRETED", False)
    on_gpu = distributions_of(logits_RV, every, device)
    assert torch.equal(on_gpu.lasts, made.lasts)
    assert torch.equal(on_gpu.moments, made.moments)


def test_fast_distributions_of_no_rows(device):
    made = distributions_of(torch.empty(0, 5), [], device)
    assert made.moments.shape == (0, 4)
    assert made.lasts.shape == (0, 3)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are watched under the interpreter")
@pytest.mark.parametrize("num_rows", [1, 3, 5])
def test_fast_distributions_of_greedy_rows_read_no_other_memory(num_rows):
    """Blocks of rows are powers of two, and the memory beyond the last row must not be read."""
    with guarded() as guard:
        distributions_of(torch.randn(num_rows, 48), [SamplingParams()] * num_rows)
    assert guard.first is None


def test_fast_distributions_refuse_strided_logits(device):
    batch = make_batch([SamplingParams()], 5).to(device)
    with pytest.raises(ValueError, check=lambda error: type(error) is ValueError):
        fast.distributions(batch, as_left(torch.zeros(5, 5, device=device).T, 1))
