"""The persistent forward: its limits, weights that are stored once, and a failed wait that is reported."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.kv_buffer import KVBuffer
from specsim.core.target import ModelConfig
from specsim.correctness.differential.pairs import make_pair
from specsim.fast.layers import Weights
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.persistent import forward
from specsim.fast.persistent import forward as limits
from specsim.fast.persistent.forward import (
    PersistentForward,
    batch_limit,
    engine_limit,
    machine_limit,
    model_limit,
    schedule_of,
    uses_persistent,
)
from specsim.fast.persistent.schedule import STRIDE
from specsim.models.checkpoint.layout import target_layout
from specsim.models.shapes import shape
from specsim.models.synthetic_pair import synthetic_pair
from specsim.models.tiny_config import tiny_config
from specsim.serving.generation import generate, load_engine

MODEL = tiny_config(
    "qwen3", 3, window=40, hidden_size=64, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=128
)
LLAMA = shape("llama-3-8b").config
FITTING = EngineOptions("fast", torch.bfloat16, forward="persistent")
TREE = SpecConfig(topk=4, num_steps=3, num_draft_tokens=8)
AUTO = replace(FITTING, forward="auto")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    layout = target_layout(MODEL)
    made = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in layout.items()}
    return dict(Weights(made).tensors)


def test_layers_become_views_of_their_stack(tensors):
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    forward = PersistentForward(MODEL, tensors)
    assert tensors.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(tensors[name], tensor)
    for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        layers = [tensors[f"model.layers.{layer}.{name}.weight"] for layer in range(3)]
        assert len({layer.untyped_storage().data_ptr() for layer in layers}) == 1
        assert layers[1].data_ptr() == layers[0].data_ptr() + layers[0].nbytes
    assert torch.equal(forward._norms[0][3], tensors["model.norm.weight"])


def test_descriptors_reach_every_weight_once(tensors):
    for name, weight in PersistentForward(MODEL, tensors)._weights.items():
        flat = weight.base.flatten()
        seen = flat.as_strided(weight.shape, weight.strides)
        whole = torch.arange(flat.numel()).as_strided(weight.shape, weight.strides)
        assert seen.numel() == flat.numel(), name
        assert torch.equal(whole.flatten().sort().values, torch.arange(flat.numel())), name


def test_a_tile_of_gate_and_up_has_both(tensors):
    weight = PersistentForward(MODEL, tensors)._weights["gate_up"]
    blocks = weight.base.flatten().as_strided(weight.shape, weight.strides)  # [H / 64, 2 layers, I, 64]
    layer, tile = 1, 5
    found = blocks[:, 2 * layer : 2 * layer + 2, tile * 8 : tile * 8 + 8].permute(1, 2, 0, 3).reshape(16, 64)
    own = tensors[f"model.layers.{layer}.mlp.gate_up_proj.weight"]
    assert torch.equal(found, torch.cat([own[tile * 8 : tile * 8 + 8], own[192 + tile * 8 : 192 + tile * 8 + 8]]))


def rows_of(requests: int, nodes: int, is_causal: bool = False) -> AttentionMetadata:
    slots = torch.zeros(requests, dtype=torch.int64)
    none = torch.zeros(requests, dtype=torch.int32)
    table, extras = slots[None], none[None]
    return AttentionMetadata(
        slots, slots, slots, nodes, True, table, slots, none, none, is_causal, none, extras, extras, extras
    )


def kv_of(slots: int) -> KVBuffer:
    return KVBuffer(MODEL.kv_layout, slots, torch.bfloat16, "meta")


def test_a_layer_of_kv_beyond_32_bits_is_refused(tensors):
    ids = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(InputError, check=lambda error: error.name == "forward"):
        PersistentForward(MODEL, tensors)(ids, torch.zeros(1, 2, 64), rows_of(1, 1), kv_of(2**23), ())


def test_trees_are_taken_and_prompts_are_not(tensors):
    every, fitting = PersistentForward(MODEL, dict(tensors)), PersistentForward(MODEL, tensors, where_it_fits=True)
    batches = ((1, 1), (2, 8), (3, 8))
    assert [every.takes(rows_of(*batch), kv_of(8)) for batch in batches] == [True] * 3
    assert [fitting.takes(rows_of(*batch), kv_of(8)) for batch in batches] == [True, True, False]
    assert not fitting.takes(rows_of(1, 1), kv_of(2**23))
    assert not every.takes(rows_of(1, 8, is_causal=True), kv_of(8))


@pytest.mark.skipif(machine_limit() is not None, reason=f"the persistent forward needs {machine_limit()}")
def test_a_count_that_is_never_reached_ends_in_an_error(monkeypatch):
    def too_few(schedule, device):
        return torch.full((schedule.num_counters * STRIDE,), -(2**20), dtype=torch.int32, device=device)

    monkeypatch.setattr(forward, "new_counters", too_few)
    pair = replace(make_pair("eagle3-large_heads", torch.bfloat16), drafter=None)
    options = EngineOptions("fast", torch.bfloat16, "cuda", "eager", forward="persistent")
    with pytest.raises(RuntimeError, match="awaited another in vain"):
        generate(pair, [[3, 4, 5]], SpecConfig.plain(), SamplingParams(max_new_tokens=6), engine=options)


@pytest.mark.skipif(machine_limit() is not None, reason=f"the persistent forward needs {machine_limit()}")
@pytest.mark.parametrize("kind", ["eagle3-large_heads", "eagle3-large_heads_qwen3"])
def test_an_invariant_request_is_the_same_solo_and_batched(kind):
    pair = make_pair(kind, torch.bfloat16)
    options = EngineOptions("fast", torch.bfloat16, "cuda", "round", batch_invariant=True, forward="persistent")
    config = SpecConfig(topk=1, num_steps=3, num_draft_tokens=4)
    prompts = [[token % 13 for token in range(size)] for size in (3, 40, 65, 130)]

    def outputs_of(*prompts):
        found = generate(pair, prompts, config, SamplingParams(max_new_tokens=12), engine=options).outputs
        return [(each.token_ids, each.logprobs) for each in found]

    assert outputs_of(*prompts) == [outputs_of(prompt)[0] for prompt in prompts]


def test_windows_and_head_norms_reach_the_schedule(tensors):
    schedule = schedule_of(MODEL, 2, 3, (0, 2))
    assert (schedule.has_windows, schedule.has_head_norms, schedule.features) == (True, True, (0, 2))
    assert PersistentForward(MODEL, tensors)._windows.tolist() == [40, 40, 40]


def test_a_failed_wait_is_raised_once_the_host_sees_it():
    made = PersistentForward.__new__(PersistentForward)
    made._error = torch.zeros(1, dtype=torch.int32)
    made.check()
    made._error[0] = 1
    with pytest.raises(RuntimeError, match="awaited another in vain"):
        made.check()


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
