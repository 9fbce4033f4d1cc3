"""Recorded forwards over prompts: the results of the plain launch, whatever the graph ran before, and nothing else."""

from dataclasses import replace

import pytest
import torch

from specsim import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.phases import Batch, PrefillInput
from specsim.fast.model.prompt_graphs import PromptGraphs, can_record
from specsim.models.shapes import shape
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine

# Their tensors are on the CPU, where kernels run only if they are interpreted.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels of this machine run on its GPU")
TREE = SpecConfig(topk=2, num_steps=2, num_draft_tokens=4, page_size=4, max_len=48)
CALLS = [[[5, 17, 3, 40, 8]], [[1, 2, 3, 4, 5, 6, 7], [30] * 3], [[9]], [list(range(20))], [[2, 3], [4], [5, 6, 7]]]


def prefilled(engine, calls):
    """Prefill each call's prompts, all in one pool: outputs and the pool."""
    pools = engine.make_pools(16, 512)
    outputs = []
    for prompts in calls:
        rows = [pools.open() for _ in prompts]
        for row, prompt in zip(rows, prompts, strict=True):
            pools.reserve(row, len(prompt) + 1)
        params = [SamplingParams(temperature=1.0)] * len(prompts)
        batch = Batch.of(rows, rows, [len(prompt) for prompt in prompts], params, engine.target.config.vocab_size)
        outputs.append(engine.prefill(batch, PrefillInput.of_prompts(prompts), pools))
    return outputs, pools


@pytest.mark.parametrize(("family", "kind"), [("llama", "eagle3"), ("qwen3", "eagle3"), ("llama", None)])
def test_a_recorded_forward_gives_what_launches_give(family, kind):
    pair = synthetic_pair("eagle3", family)
    pair = pair if kind else replace(pair, drafter=None)
    config = TREE if kind else SpecConfig.plain(4, 48)
    engines = [load_engine(pair, config, EngineOptions("fast", torch.float32, "cpu", "round")) for _ in range(2)]
    recorded = engines[1]._prompts = PromptGraphs(engines[1]._forward_rows, rows=(8, 16), requests=(1, 2))
    (expected, plain), (found, pools) = (prefilled(engine, CALLS) for engine in engines)
    assert sorted(recorded._graphs) == [(8, 1), (16, 2)]  # the others are too long, or too many
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.next_tokens, theirs.next_tokens)
        torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=0, atol=1e-5)
        for name, tensor in theirs.draft_input.tensors.items():
            torch.testing.assert_close(ours.draft_input.tensors[name], tensor, rtol=0, atol=1e-4)
    for ours, theirs in ((pools.target, plain.target), (pools.draft, plain.draft)):
        for part in ("keys", "values") if ours is not None else ():
            torch.testing.assert_close(getattr(ours, part), getattr(theirs, part), rtol=0, atol=1e-5, equal_nan=True)
    assert torch.equal(pools.token_ids, plain.token_ids)


def test_graphs_of_other_pools_are_dropped():
    engine = load_engine(synthetic_pair("eagle3", "llama"), TREE, EngineOptions("fast", torch.float32, "cpu", "round"))
    recorded = engine._prompts = PromptGraphs(engine._forward_rows, rows=(8,), requests=(1,))
    prefilled(engine, CALLS[:1])
    before = recorded._graphs[8, 1]
    prefilled(engine, CALLS[:1])
    assert recorded._graphs[8, 1] is not before


def test_only_dense_layers_with_plain_attention_are_recorded():
    assert can_record(shape("llama-3-8b").config)
    assert not can_record(shape("gpt-oss-20b").config)


def test_prompts_are_launched_one_by_one_without_a_gpu():
    engine = load_engine(synthetic_pair("eagle3", "llama"), TREE, EngineOptions("fast", torch.float32, "cpu", "round"))
    assert engine._prompts is None
