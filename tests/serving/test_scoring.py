"""Likeliest tokens of an output: those of a plain forward, whatever tree was verified."""

import json

import pytest
import torch

from specsim import SamplingParams, SpecConfig, generate
from specsim.core.engine_options import EngineOptions
from specsim.correctness.explain import read_answers
from specsim.models.load import load
from specsim.models.synthetic_pair import synthetic_pair
from specsim.reference.oracle_forward import in_dtype, target_forward
from specsim.serving.guidance import Guidance

PROMPTS = [[1, 2, 3], [7, 8, 9, 10]]


@pytest.mark.parametrize("impl", ["reference", "fast"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", [SpecConfig(1, 2, 3), SpecConfig(2, 2, 5), SpecConfig.plain()])
def test_every_place_has_the_likeliest_tokens_of_a_plain_forward(config, temperature, impl):
    pair = synthetic_pair("eagle3")
    sampling = SamplingParams(max_new_tokens=6, temperature=temperature, ignore_eos=True)
    options = EngineOptions(impl, torch.float32)
    generation = generate(pair, PROMPTS, config, sampling, engine=options, top_logprobs=4)
    exact = in_dtype(pair.target, torch.float64)
    for output in generation.outputs:
        tokens = [*output.prompt_token_ids, *output.token_ids]
        logits = target_forward(exact.config, exact.tensors, tokens, ())[0]
        first = len(output.prompt_token_ids) - 1
        expected = torch.log_softmax(logits[first:-1].double() / (temperature or 1.0), dim=-1)
        assert len(output.top_logprobs) == len(output.token_ids) == 6
        for row, expected_V, token, logprob in zip(
            output.top_logprobs, expected, output.token_ids, output.logprobs, strict=True
        ):
            assert list(row) == expected_V.topk(4).indices.tolist()
            assert list(row.values()) == pytest.approx(expected_V.topk(4).values.tolist(), abs=1e-4)
            assert row.get(token, logprob) == pytest.approx(logprob, abs=1e-4)


def test_penalties_bias_and_grammar_are_in_the_scores():
    """The likeliest token of a greedy output is its own, with the log probability of its round."""
    pair = load()
    sampling = SamplingParams(max_new_tokens=8, presence_penalty=1.5, logit_bias={266: -100.0})
    grammar = Guidance.regex(pair, r"[a-z ]+")
    generation = generate(pair, "def add(a, b):", sampling=sampling, grammars=grammar, top_logprobs=2)
    (output,) = generation.outputs
    assert [next(iter(row)) for row in output.top_logprobs] == list(output.token_ids)
    assert [max(row.values()) for row in output.top_logprobs] == list(output.logprobs)
    others = [min(row.values()) for row in output.top_logprobs]
    assert all(other < logprob for other, logprob in zip(others, output.logprobs, strict=True))


def test_the_command_writes_what_explain_reads(call, tmp_path):
    out = tmp_path / "out.json"
    few = ("generate", "--max-new-tokens", "4", "--top-logprobs", "3")
    assert call(*few, "--json", str(out))[::2] == (0, "")
    (output,) = json.loads(out.read_text())["outputs"]
    assert [len(row) for row in output["top_logprobs"]] == [3] * 4
    (answer,) = read_answers(out, "a")
    assert [max(row, key=row.get) for row in answer.top] == output["token_ids"]
    for options, name in (((), "top_logprobs"), (("--json", str(out), "--html", str(tmp_path / "a.html")), "html")):
        status, _, err = call(*few, *options)
        assert (status, name in err) == (2, True)
