"""Formats of quantised checkpoints: bytes, rates of products, KV, and configs that are refused."""

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, Efficiency, hardware, model
from specsim.simulator.cell import Cell
from specsim.simulator.model import read_config
from specsim.simulator.quantization import FLOAT8, HALF, MXFP4, NVFP4, Quantization, quantization_of

DENSE, EXPERTS = read_config("llama-3-8b")[1], read_config("glm-4.7-flash")[1]
PERFECT = Efficiency(1, 1, 1, mxfp4_experts=1, gap=0, launch=0, host=0, host_request=0, collective=0)
NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4_GROUP = {"targets": ["Linear"], "weights": NVFP4_WEIGHTS, "input_activations": NVFP4_WEIGHTS}


def compressed(weights: dict, activations: dict | None = None, **more: object) -> dict:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def formats(settings: object, has_experts: bool = False) -> Quantization:
    return quantization_of(settings, 32, has_experts)


@pytest.mark.parametrize(
    ("settings", "bits", "dtype"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, None),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8, None),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64, None),
        (compressed({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}), 4 + 16 / 128, None),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8}), 8, "int8"),
        (compressed({"num_bits": 8, "type": "float", "strategy": "tensor"}, {"num_bits": 8}), 8, "float8"),
        (compressed(NVFP4_WEIGHTS, NVFP4_WEIGHTS), 4.5, "float4"),
        (compressed(NVFP4_WEIGHTS), 4.5, None),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, 4.5, "float4"),
        ({"quant_method": "modelopt", "config_groups": {"group_0": NVFP4_GROUP}}, 4.5, "float4"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, 8, "float8"),
        ({"quant_method": "fbgemm_fp8"}, 8, "float8"),
    ],
)
def test_bits_and_products_follow_from_the_config(settings, bits, dtype):
    found = formats(settings)
    assert found.layers == found.experts
    assert found.layers.bytes * 8 == pytest.approx(bits)
    assert found.layers.dtype == dtype
    tables = 2 * model("llama-3-8b").head_weights
    target = model(DENSE | {"quantization_config": settings})
    assert target.bytes == pytest.approx(2 * tables + (target.parameters - tables) * bits / 8)


def test_methods_without_a_choice_have_their_formats():
    assert formats(None) == formats({"quant_method": "none"}) == Quantization(HALF, HALF, 2.0)
    assert formats({"quant_method": "fp8"}) == Quantization(FLOAT8, FLOAT8, 2.0)
    assert formats({"quant_method": "mxfp4"}) == Quantization(HALF, MXFP4, 2.0)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    assert formats(compressed(weights)).layers == MXFP4


@pytest.mark.parametrize("ignored", ["re:.*self_attn.*", "model.layers.16.self_attn*", "model.layers.16.self_attn"])
def test_ignored_attention_has_16_bits_next_to_experts(ignored):
    settings = compressed(NVFP4_WEIGHTS, NVFP4_WEIGHTS) | {"ignore": ["lm_head", ignored]}
    assert formats(settings, has_experts=True) == Quantization(HALF, NVFP4, 2.0)
    with pytest.raises(InputError, check=lambda error: error.name == "quantization_config"):
        formats(settings)


def test_groups_take_the_modules_they_name():
    experts = {"targets": ["re:.*mlp.experts.*"], "weights": NVFP4_WEIGHTS, "input_activations": NVFP4_WEIGHTS}
    others = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}, "input_activations": {"num_bits": 8}}
    found = formats({"quant_method": "compressed-tensors", "config_groups": {"a": experts, "b": others}}, True)
    assert (found.experts, found.layers.dtype, found.layers.bytes) == (NVFP4, "float8", 1.0)


def test_kv_has_the_bytes_of_its_scheme_or_option():
    scheme = {"num_bits": 8, "type": "float"}
    assert formats(compressed(NVFP4_WEIGHTS, kv_cache_scheme=scheme)).kv_bytes == 1.0
    settings = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}
    assert formats(settings).kv_bytes == 1.0
    full, half = (Cell(kv_cache_dtype=dtype) for dtype in ("auto", "fp8"))
    slots = [each.scenario.slots(each.option(each.config)) for each in (full, half)]
    assert slots[1] == pytest.approx(2 * slots[0], rel=1e-3)
    with pytest.raises(InputError, check=lambda error: error.name == "kv_cache_dtype"):
        assert Cell(kv_cache_dtype="int3").scenario


def test_4_bit_products_run_at_their_rate_where_there_is_one():
    target = model(DENSE | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}})
    seconds = {}
    for name in ("B200", "H100-SXM"):
        cost = CostModel(hardware(name), target, efficiency=PERFECT)
        less, more = (cost.prefill(np.array([size]), np.array([0])) for size in (10**5, 2 * 10**5))
        seconds[name] = more - less
    attention = 32 * 4 * 4096 * 3 * 10**10 / 2
    products = 2 * (target.active_parameters - target.head_weights) * 10**5
    b200, h100 = hardware("B200"), hardware("H100-SXM")
    expected = products / b200.flops("float4") + attention / b200.flops("bfloat16")
    assert seconds["B200"] == pytest.approx(expected, rel=1e-4)
    assert seconds["H100-SXM"] == pytest.approx((products + attention) / h100.flops("bfloat16"), rel=1e-4)
    round_ = CostModel(b200, target, efficiency=PERFECT).round(np.array([0]), SpecConfig.plain())
    assert round_ < CostModel(b200, model("llama-3-8b"), efficiency=PERFECT).round(np.array([0]), SpecConfig.plain())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"quant_method": "hqq"}, "quantization_config"),
        ("awq", "quantization_config"),
        ({"quant_method": "awq"}, "bits"),
        ({"quant_method": "gptq", "bits": 5}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo"),
        (compressed({"num_bits": None}), "num_bits"),
        (compressed({"num_bits": 4, "type": "word"}), "type"),
        (compressed(NVFP4_WEIGHTS) | {"ignore": "lm_head"}, "ignore"),
        (compressed(NVFP4_WEIGHTS) | {"ignore": ["re:("]}, "quantization_config"),
        (compressed(NVFP4_WEIGHTS) | {"ignore": [r"re:([\w.]+)*x"]}, "quantization_config"),
        (compressed(NVFP4_WEIGHTS) | {"ignore": ["re:" + ".*" * 30 + "x"]}, "quantization_config"),
        (compressed(NVFP4_WEIGHTS) | {"ignore": ["re:" + "[" * 10**6]}, "quantization_config"),
        (compressed({"num_bits": 4, "strategy": "blocks"}), "strategy"),
        (compressed({"num_bits": 4, "group_size": 64, "symmetric": "no"}), "symmetric"),
        (compressed(NVFP4_WEIGHTS) | {"kv_cache_scheme": "fp8"}, "kv_cache_scheme"),
        (compressed(NVFP4_WEIGHTS) | {"kv_cache_scheme": {"num_bits": "8"}}, "num_bits"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "INT4"}, "kv_cache_quant_algo"),
    ],
)
def test_a_config_that_is_not_understood_is_refused(settings, name):
    with pytest.raises(InputError, check=lambda error: error.name == name):
        formats(settings)
