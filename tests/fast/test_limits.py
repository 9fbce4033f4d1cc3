"""The persistent forward is refused with its reason where it does not fit, and the default where it was timed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specsim.core.config import SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.target import ModelConfig
from specsim.fast.persistent import forward as limits
from specsim.fast.persistent.forward import (
    batch_limit,
    engine_limit,
    machine_limit,
    model_limit,
    schedule_of,
    uses_persistent,
)
from specsim.models.shapes import shape
from specsim.models.synthetic_pair import synthetic_pair
from specsim.serving.generation import load_engine

LLAMA = shape("llama-3-8b").config
FITTING = EngineOptions("fast", torch.bfloat16, forward="persistent")
TREE = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8)


def with_mlp(model: ModelConfig, **changes) -> ModelConfig:
    return replace(model, layers=tuple(replace(each, mlp=replace(each.mlp, **changes)) for each in model.layers))


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.1-8b", "llama-2-7b", "qwen3-8b", "qwen3-4b", "llama-2-70b"])
def test_published_shapes_fit(name):
    assert model_limit(shape(name).config) is None


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (shape("gpt-oss-20b").config, "experts"),
        (shape("qwen3-30b-a3b").config, "experts"),
        (LLAMA.with_heads(head_dim=64), "heads of 128 channels, not 64"),
        (LLAMA.with_heads(bias=True), "neither biases nor sinks"),
        (LLAMA.with_heads(has_sinks=True), "neither biases nor sinks"),
        (LLAMA.with_windows([8] * 32), "windows are at least 16, not 8"),
        (replace(LLAMA, hidden_size=4000), "hidden_size is a multiple of 64, not 4000"),
        (with_mlp(LLAMA, size=1000), "intermediate_size is a multiple of 64, not 1000"),
        (with_mlp(LLAMA, bias=True), "its MLP has them"),
    ],
)
def test_a_model_that_does_not_fit_has_a_reason(model, reason):
    assert reason in (model_limit(model) or "")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float16}, "dtype bfloat16, not float16"),
        ({"kv_dtype": "fp8_e4m3"}, "kv_dtype model"),
        ({"tensor_parallel": 2}, "one GPU"),
    ],
)
def test_options_that_do_not_fit_have_a_reason(change, reason):
    assert engine_limit(FITTING) is None
    assert reason in (engine_limit(replace(FITTING, **change)) or "")


@pytest.mark.parametrize(
    ("requests", "nodes", "reason"),
    [(1, 16, None), (16, 1, None), (2, 8, None), (1, 17, "at most 16 rows"), (3, 6, "at most 16 rows")],
)
def test_rows_of_a_batch_are_limited(requests, nodes, reason):
    found = batch_limit(LLAMA, requests, nodes)
    assert found is None if reason is None else reason in found


def test_many_heads_of_many_requests_are_refused():
    assert "pairs of a request and a KV head" in (batch_limit(shape("llama-2-7b").config, 8, 1) or "")
    assert "pairs of a row and a query head" in (batch_limit(shape("llama-2-70b").config, 1, 16) or "")
    with pytest.raises(InputError, check=lambda error: error.name == "forward"):
        schedule_of(LLAMA, 1, 17)


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that this machine has the GPU where forwards were timed."""
    made = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30)
    monkeypatch.setattr(limits, "machine_limit", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: made)
    return made


AUTO = replace(FITTING, forward="auto")


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3.1-8b", "mistral-7b-v0.1", "qwen3-8b"])
def test_auto_is_persistent_where_it_was_timed(gpu, name):
    assert EngineOptions().forward == "auto"
    assert uses_persistent(shape(name).config, AUTO, TREE)
    assert not uses_persistent(shape(name).config, replace(AUTO, forward="kernels"), TREE)


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b", "qwen3-4b", "qwen3-30b-a3b"])
def test_auto_is_kernels_for_other_models(gpu, name):
    assert not uses_persistent(shape(name).config, AUTO, TREE)


@pytest.mark.parametrize("change", [{"batch_invariant": True}, {"dtype": torch.float16}, {"kv_dtype": "fp8_e4m3"}])
def test_auto_is_kernels_for_options_that_do_not_fit(gpu, change):
    assert not uses_persistent(LLAMA, replace(AUTO, **change), TREE)


@pytest.mark.parametrize("change", [{"name": "NVIDIA H100"}, {"total_memory": 80 * 2**30}])
def test_auto_is_kernels_on_other_gpus(gpu, change):
    vars(gpu).update(change)
    assert not uses_persistent(LLAMA, AUTO, TREE)


def test_auto_is_kernels_where_the_machine_does_not_fit(gpu, monkeypatch):
    monkeypatch.setattr(limits, "machine_limit", lambda: "another machine")
    assert not uses_persistent(LLAMA, AUTO, TREE)


def test_auto_takes_trees_of_which_some_batches_may_fit(gpu):
    assert uses_persistent(LLAMA, AUTO, SpecConfig(topk=8, num_steps=6, num_draft_tokens=64))


def test_a_persistent_forward_is_chosen_where_it_fits(monkeypatch):
    monkeypatch.setattr(limits, "machine_limit", lambda: None)
    assert uses_persistent(LLAMA, FITTING, TREE)
    assert uses_persistent(LLAMA, replace(FITTING, batch_invariant=True), TREE)
    for model, options, config in (
        (shape("gpt-oss-20b").config, FITTING, TREE),
        (LLAMA, replace(FITTING, dtype=torch.float16), TREE),
        (LLAMA, FITTING, SpecConfig(topk=8, num_steps=6, num_draft_tokens=64)),
    ):
        with pytest.raises(InputError, check=lambda error: error.name == "forward"):
            uses_persistent(model, options, config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_the_machine_is_the_reason():
    assert "this machine has none" in (machine_limit() or "")
    with pytest.raises(InputError, match="this machine has none"):
        uses_persistent(LLAMA, FITTING, TREE)


def test_an_engine_refuses_a_model_that_does_not_fit(device):
    options = replace(FITTING, device=device.type if isinstance(device, torch.device) else device)
    with pytest.raises(InputError, match="heads of 128 channels"):
        load_engine(synthetic_pair("eagle3"), SpecConfig(topk=2, num_steps=2, num_draft_tokens=4), options)


def test_the_reference_has_no_persistent_forward():
    with pytest.raises(InputError, check=lambda error: error.name == "forward"):
        EngineOptions(forward="persistent")
