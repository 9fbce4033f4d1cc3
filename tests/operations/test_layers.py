"""Parts of a decoder layer against their formulas and against transformers."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch, PrefillInput
from specsim.core.pool import KVBuffer, KVPool
from specsim.core.target import Rope
from specsim.fast import layers as fast
from specsim.fast.model import metadata as metadata_of_kernels
from specsim.fast.model import rotary
from specsim.fast.model.rows import HiddenRows, Norm
from specsim.models.synthetic_pair import LLAMA3
from specsim.models.tiny_config import tiny_config
from specsim.reference.attention import AttentionMetadata, Keys, prefill_metadata
from specsim.reference.layers import Weights, gated_mlp, inverse_frequencies, rms_norm, rotate, self_attention

from .transformers_models import llama_config


def assert_close(actual: torch.Tensor, expected: torch.Tensor, budget: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=budget, atol=budget)


def test_weights_are_seen_from_below_a_prefix():
    tensors = {
        "fc.weight": torch.ones(2, 3),
        "layers.0.fc.weight": torch.zeros(2, 3),
        "layers.0.fc.bias": torch.ones(2),
    }
    below = Weights(tensors).under("layers").under("0")
    assert below["fc.weight"] is tensors["layers.0.fc.weight"]
    assert below.get("norm.weight") is None
    assert torch.equal(below.project(torch.ones(5, 3), "fc"), torch.ones(5, 2))
    assert torch.equal(Weights(tensors).project(torch.ones(5, 3), "fc"), torch.full((5, 2), 3.0))


@pytest.mark.parametrize("width", [1, 7, 32])
def test_rms_norm_is_its_formula(width):
    x, weight = torch.randn(5, width, dtype=torch.float64), torch.randn(width, dtype=torch.float64)
    expected = [
        [weight[i] * row[i] / math.sqrt(sum(v * v for v in row) / width + 1e-3) for i in range(width)]
        for row in x.tolist()
    ]
    assert_close(rms_norm(x, weight, 1e-3), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rms_norm_of_narrow_types_is_computed_in_float32(dtype):
    """The row is rounded to the type before the weight, bit for bit.

    1e4 squared overflows float16.
    """
    theirs = LlamaRMSNorm(33, eps=1e-5).to(dtype)
    theirs.weight.data = torch.randn(33, dtype=dtype)
    x = torch.randn(6, 33).mul(torch.tensor([1e-3, 1e-2, 1.0, 1e2, 1e3, 1e4])[:, None]).to(dtype)
    assert torch.equal(rms_norm(x, theirs.weight.data, 1e-5), theirs(x))


@pytest.mark.parametrize("head_dim", [2, 6, 16, 64])
def test_default_frequencies_are_the_powers_of_the_base(head_dim):
    config = tiny_config(head_dim=head_dim, rope_theta=5e5)
    expected = torch.tensor([5e5 ** (-2 * i / head_dim) for i in range(head_dim // 2)])
    torch.testing.assert_close(inverse_frequencies(config.rope), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("original", [64, 8192])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_llama3_frequencies_equal_transformers(head_dim, original):
    """Frequencies agree within a few units in the last place of float32, as the order of operations differs.

    All three bands of the rule occur.
    """
    scaling = LLAMA3 | {"original_max_position_embeddings": original}
    config = tiny_config(head_dim=head_dim, rope_theta=5e5, rope_scaling=scaling)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](llama_config(config), device="cpu")
    torch.testing.assert_close(inverse_frequencies(config.rope), theirs, rtol=1e-6, atol=0)
    ratio = theirs / inverse_frequencies(replace(config.rope, scaling={}))
    assert ratio.max() == 1
    assert ratio.min() == 1 / 8
    assert ((ratio < 0.99) & (ratio > 0.13)).any()


YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


@pytest.mark.parametrize("changes", [{}, {"truncate": False}, {"beta_fast": 6.0, "beta_slow": 2.0}], ids=str)
@pytest.mark.parametrize("original", [64, 4096])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_yarn_frequencies_equal_transformers(head_dim, original, changes):
    scaling = YARN | {"original_max_position_embeddings": original} | changes
    config = tiny_config(head_dim=head_dim, rope_theta=1.5e5, rope_scaling=scaling)
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](llama_config(config), device="cpu")
    torch.testing.assert_close(inverse_frequencies(config.rope), theirs, rtol=1e-6, atol=0)
    ratio = theirs / inverse_frequencies(replace(config.rope, scaling={}))
    assert ((ratio < 0.99) & (ratio > 0.13)).any()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_the_first_channels_as_complex_numbers(interleaved):
    """Channels beyond the rotated ones stay as they are."""
    rope = Rope(100.0, 6, {"rope_type": "yarn", "attention_factor": 1.5}, interleaved)
    x, positions = torch.randn(5, 2, 10, dtype=torch.float64), torch.tensor([0, 1, 7, 3, 40])
    inverse = torch.tensor([1.0, 0.25, 0.0625])
    angle = (positions[:, None].float() * inverse).double()[:, None]
    pairs = (slice(0, 6, 2), slice(1, 6, 2)) if interleaved else (slice(0, 3), slice(3, 6))
    turned = torch.complex(*(x[..., part] for part in pairs)) * torch.polar(torch.full_like(angle, 1.5), angle)
    found = rotate(x, positions, inverse, rope)
    assert_close(found[..., pairs[0]], turned.real, 1e-6)
    assert_close(found[..., pairs[1]], turned.imag, 1e-6)
    assert torch.equal(found[..., 6:], x[..., 6:])


@pytest.mark.parametrize("rope_scaling", [{}, LLAMA3], ids=["default", "llama3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotation_equals_transformers_bit_for_bit(dtype, rope_scaling):
    """The float32 frequencies are the same.

    Positions include distant ones, where float32 angles are coarse.
    """
    config = tiny_config(rope_scaling=rope_scaling)
    rotary = LlamaRotaryEmbedding(llama_config(config))
    positions = torch.tensor([0, 1, 2, 63, 64, 500, 131071])
    query, key = torch.randn(7, 4, 16, dtype=dtype), torch.randn(7, 2, 16, dtype=dtype)
    cos, sin = rotary(query, positions[None])
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    for ours, theirs in zip((query, key), expected, strict=True):
        assert torch.equal(rotate(ours, positions, rotary.inv_freq), theirs[0].transpose(0, 1))


def test_rotation_turns_each_pair_by_its_angle():
    """(x_i, x_{i + D/2}) as a complex number is multiplied by e^{i position frequency}."""
    x, inverse = torch.randn(5, 3, 6, dtype=torch.float64), torch.tensor([1.0, 0.5, 0.125])
    positions = torch.tensor([0, 1, 3, 8, 20])
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.exp(1j * positions[:, None, None] * inverse.double())
    assert_close(rotate(x, positions, inverse), torch.cat([turned.real, turned.imag], dim=-1), budget=1e-6)


def test_products_of_rotated_vectors_depend_on_the_distance_only():
    query, key = torch.randn(2, 1, 1, 16, dtype=torch.float64)
    inverse = inverse_frequencies(tiny_config().rope)
    products = [
        (rotate(query, torch.tensor([start + 7]), inverse) * rotate(key, torch.tensor([start]), inverse)).sum()
        for start in (0, 1, 90)
    ]
    assert_close(torch.stack(products), products[0].expand(3), budget=1e-5)


def layer_weights(config) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    """Make random weights of one attention and one MLP, with the biases of the config."""
    theirs = llama_config(config)
    attention, mlp = LlamaAttention(theirs, layer_idx=0), LlamaMLP(theirs)
    state = {f"self_attn.{n}": t for n, t in attention.state_dict().items()} | {
        f"mlp.{n}": t for n, t in mlp.state_dict().items()
    }
    return theirs, {name: torch.randn(tensor.shape, dtype=torch.float64) * 0.2 for name, tensor in state.items()}


def below(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


ATTENTIONS = {
    "plain": {},
    "bias": {"attention_bias": True},
    "one key head": {"num_kv_heads": 1},
    "no grouping": {"num_kv_heads": 4},
    "head_dim not hidden over heads": {"num_heads": 2, "num_kv_heads": 2, "head_dim": 10},
}


@pytest.mark.parametrize("changes", ATTENTIONS.values(), ids=ATTENTIONS)
def test_self_attention_equals_transformers(changes):
    config = tiny_config(num_layers=3, **changes)
    theirs, tensors = layer_weights(config)
    attention = LlamaAttention(theirs, layer_idx=0).double()
    attention.load_state_dict(below(tensors, "self_attn."))
    x, rotary, positions = torch.randn(7, 32, dtype=torch.float64), LlamaRotaryEmbedding(theirs), torch.arange(7)
    expected, _ = attention(
        x[None], position_embeddings=rotary(x, positions[None]), attention_mask=None, is_causal=True
    )
    kv, slots = KVBuffer(config.kv_layout, 11, torch.float64), torch.randperm(11)[:7]
    kv.keys.fill_(math.nan)
    kv.values.fill_(math.nan)
    metadata = AttentionMetadata(positions, slots, (Keys(slots, positions, positions <= positions[:, None]),))
    weights = Weights(tensors).under("self_attn")
    out = self_attention(x, weights, config, inverse_frequencies(config.rope), 1, kv, metadata)
    assert_close(out, expected[0].detach())
    written = torch.zeros(3, 11, dtype=torch.bool)
    written[1, slots] = True
    for buffer in (kv.keys, kv.values):
        assert torch.equal(buffer.isfinite().all((-1, -2)), written)
        assert torch.equal(buffer.isnan().all((-1, -2)), ~written)


def test_keys_are_stored_rotated_and_values_as_they_are():
    config = tiny_config(num_layers=1)
    _, tensors = layer_weights(config)
    x, positions, slots = torch.randn(3, 32, dtype=torch.float64), torch.tensor([5, 6, 9]), torch.tensor([2, -1, 0])
    kv = KVBuffer(config.kv_layout, 4, torch.float64)
    mask = torch.eye(3, dtype=torch.bool) & (slots >= 0)
    metadata = AttentionMetadata(positions, slots, (Keys(slots, positions, mask),))
    self_attention(x, Weights(tensors).under("self_attn"), config, inverse_frequencies(config.rope), 0, kv, metadata)
    key, value = (x @ tensors[f"self_attn.{name}_proj.weight"].T for name in "kv")
    rotated = rotate(key.view(3, 2, 16), positions, inverse_frequencies(config.rope))
    for row, slot in ((0, 2), (2, 0)):
        assert_close(kv.keys[0, slot], rotated[row])
        assert_close(kv.values[0, slot], value.view(3, 2, 16)[row])


@pytest.mark.parametrize("mlp_bias", [False, True])
def test_gated_mlp_equals_transformers(mlp_bias):
    theirs, tensors = layer_weights(tiny_config(mlp_bias=mlp_bias))
    mlp = LlamaMLP(theirs).double()
    mlp.load_state_dict(below(tensors, "mlp."))
    x = torch.randn(5, 32, dtype=torch.float64)
    assert_close(gated_mlp(x, Weights(tensors).under("mlp")), mlp(x).detach())


# The kernels. They round where the reference rounds; in float32 they reduce in another order.


def assert_within(out: torch.Tensor, exact: torch.Tensor, roundings: int, scale: torch.Tensor | float = 1.0) -> None:
    """Check the error from float64, in units of rounding an element of that scale to the type."""
    units = roundings * torch.finfo(out.dtype).eps
    assert ((out.cpu().double() - exact).abs() <= units * exact.abs().clamp(min=scale)).all()


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "mlp_bias": True}], ids=["plain", "bias"])
def test_fast_weights_stack_the_projections_of_one_input(changes):
    config = tiny_config(**changes)
    _, tensors = layer_weights(config)
    tensors = {f"layers.0.{name}": tensor for name, tensor in tensors.items()} | {"fc.weight": torch.ones(3, 2)}
    ours, theirs = fast.Weights(tensors).under("layers").under("0"), Weights(tensors).under("layers.0")
    x = torch.randn(5, 32, dtype=torch.float64)
    parts = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    for (whole, names), block in zip(parts.items(), ("self_attn", "mlp"), strict=True):
        expected = torch.cat([theirs.under(block).project(x, name) for name in names], dim=1)
        assert_close(ours.under(block).project(HiddenRows(x), whole), expected)
        assert [ours.under(block).get(f"{name}.weight") for name in names] == [None] * len(names)
    assert fast.Weights(tensors)["fc.weight"] is tensors["fc.weight"]


@pytest.mark.parametrize(("batch_invariant", "head_dim"), [(False, 16), (True, 16), (True, 32)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_a_fast_layer_equals_the_references(family, batch_invariant, head_dim, device, program_order):
    """Attention and MLP over prompts of 7 and 4 tokens, for qwen3 with norms and for mistral in a window.

    batch_invariant: products are streamed, and heads of 32 are rotated in the same kernel.
    """
    config = tiny_config(family, window=3 if family == "mistral" else None, head_dim=head_dim)
    _, tensors = layer_weights(config)
    if family == "qwen3":
        tensors |= {f"self_attn.{name}_norm.weight": torch.randn(head_dim, dtype=torch.float64) for name in "qk"}
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    pools = [KVPool(KVBuffer(config.kv_layout, 24, dtype, where), None, 4, 2, 12)
             for dtype, where in ((torch.float64, "cpu"), (torch.float32, device))]  # fmt: skip
    for pool in pools:
        for row in (pool.open(), pool.open()):
            pool.reserve(row, 8)
        pool.target.keys.fill_(math.nan)
        pool.target.values.fill_(math.nan)
    prefill = PrefillInput.of_prompts([[0] * 7, [0] * 4])
    batch = Batch.of([0, 1], [0, 1], [7, 4], [SamplingParams()] * 2, vocab_size=3)
    x, inverse = torch.randn(11, 32), inverse_frequencies(config.rope)
    exact = Weights({name: tensor.double() for name, tensor in tensors.items()})
    metadata = prefill_metadata(batch, prefill, pools[0])
    attended = self_attention(x.double(), exact.under("self_attn"), config, inverse, 1, pools[0].target, metadata)
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    weights = fast.Weights(tensors, batch_invariant=batch_invariant)
    metadata = metadata_of_kernels.prefill_metadata(batch.to(device), prefill.to(device), pools[1])
    base = torch.randn(11, 32).to(device)
    turns = rotary.rotations(metadata.positions, inverse.to(device), x.dtype)
    forward = rotary.ForwardContext(turns, metadata, pools[1].target)
    norm = Norm(torch.ones(32, device=device), 1e-5)
    out = fast.self_attention_residual(
        base, HiddenRows(x.to(device)), weights.under("self_attn"), config, 1, forward, norm
    )
    expected = base.cpu().double() + attended
    assert out.norm is norm
    assert_within(out.values, expected, 64, float(expected.abs().max()))
    expected = attended + gated_mlp(rms_norm(attended, torch.ones(32), 1e-5), exact.under("mlp"))
    grown = fast.gated_mlp_residual(HiddenRows(attended.float().to(device), norm), weights.under("mlp"), norm)
    assert_within(grown.values, expected, 32, float(expected.abs().max()))


def test_weights_one_after_another_are_stacked_without_a_copy():
    whole = torch.randn(7, 4)
    parts = dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), whole.split([4, 2, 1]), strict=True))
    assert fast.Weights(parts)["qkv_proj.weight"].data_ptr() == whole.data_ptr()
    assert torch.equal(fast.Weights(parts)["qkv_proj.weight"], whole)
    first, *others = parts
    elsewhere = dict(zip([*others, first], whole.split([2, 1, 4]), strict=True))
    assert torch.equal(fast.Weights(elsewhere)["qkv_proj.weight"], torch.cat([whole[3:], whole[:3]]))
    parts["v_proj.weight"] = parts["v_proj.weight"].clone()
    assert fast.Weights(parts)["qkv_proj.weight"].data_ptr() != whole.data_ptr()
    assert torch.equal(fast.Weights(parts)["qkv_proj.weight"], whole)


def test_transposed_weights_of_a_checkpoint_are_read_in_order():
    stored = torch.randn(3, 5)
    weights = fast.Weights({"fc.weight": stored.T})
    assert weights["fc.weight"].is_contiguous()
    assert torch.equal(weights["fc.weight"], stored.T)
