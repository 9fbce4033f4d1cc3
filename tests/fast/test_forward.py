"""The persistent forward stores weights once, describes them to the device, and reports a failed wait."""

from dataclasses import replace

import pytest
import torch

from specsim.core.config import SamplingParams, SpecConfig
from specsim.core.engine_options import EngineOptions
from specsim.core.errors import InputError
from specsim.core.kv_buffer import KVBuffer
from specsim.correctness.differential.pairs import make_pair
from specsim.fast.layers import Weights
from specsim.fast.model.metadata import AttentionMetadata
from specsim.fast.persistent import forward
from specsim.fast.persistent.forward import PersistentForward, machine_limit, schedule_of
from specsim.fast.persistent.schedule import STRIDE
from specsim.models.checkpoint.layout import target_layout
from specsim.models.tiny_config import tiny_config
from specsim.serving.generation import generate

MODEL = tiny_config(
    "qwen3", 3, window=40, hidden_size=64, intermediate_size=192, num_heads=4, num_kv_heads=2, head_dim=128
)


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
