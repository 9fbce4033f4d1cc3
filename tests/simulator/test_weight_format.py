"""Weights of 16, 8 and 4 bits: bytes read, and the rate of matrix products."""

import numpy as np
import pytest

from specsim import SpecConfig
from specsim.core.errors import InputError
from specsim.simulator import CostModel, Efficiency, drafter, hardware, model
from specsim.simulator.model import read_config

PERFECT = Efficiency(1, 1, 1, mxfp4_experts=1, gap=0, launch=0, host=0, host_request=0, collective=0)
H100, A100 = hardware("H100-SXM"), hardware("A100-80GB-SXM")
SHAPE = read_config("llama-3-8b")[1]
HALF, FLOAT8 = model("llama-3-8b"), model(SHAPE | {"quantization_config": {"quant_method": "fp8"}})
INSIDE, HEAD, TOKENS = HALF.active_parameters - HALF.head_weights, HALF.head_weights, 8192
ATTENTION = 32 * 4 * 4096 * TOKENS * (TOKENS + 1) / 2


def prefill(gpu, target) -> float:
    """Seconds of a long prefill, without those of the last row's logits, which read the head in 16 bits."""
    seconds = CostModel(gpu, target, efficiency=PERFECT).prefill(np.array([TOKENS]), np.array([0]))
    return seconds - (2 * HEAD + 12 * target.vocab_size) / gpu.bandwidth


def test_fp8_weights_are_half_the_bytes_but_for_tables():
    assert HALF.bytes - FLOAT8.bytes == INSIDE
    assert FLOAT8.kv_bytes_per_token == HALF.kv_bytes_per_token


def test_products_of_fp8_weights_run_at_the_fp8_rate():
    fp8, half = H100.flops("float8"), H100.flops("bfloat16")
    assert prefill(H100, FLOAT8) == pytest.approx(2 * INSIDE * TOKENS / fp8 + ATTENTION / half, rel=1e-9)
    assert prefill(H100, HALF) == pytest.approx((2 * INSIDE * TOKENS + ATTENTION) / half, rel=1e-9)


def test_hardware_without_fp8_widens_such_weights():
    assert "float8" not in A100.peak_flops
    assert prefill(A100, FLOAT8) == prefill(A100, HALF)
    saved = INSIDE / A100.bandwidth
    half, fp8 = (
        CostModel(A100, each, efficiency=PERFECT).round(np.array([0]), SpecConfig.plain()) for each in (HALF, FLOAT8)
    )
    assert half - fp8 == pytest.approx(saved, rel=1e-9)


def test_experts_in_4_bits_are_computed_in_16():
    moe = model("gpt-oss-20b")
    inside = moe.active_parameters - moe.head_weights
    cost = CostModel(H100, moe, efficiency=PERFECT)
    less, more = (cost.prefill(np.array([size]), np.array([0])) for size in (10**6, 2 * 10**6))
    full = 12 * 4 * 64 * 64 * (4 - 1) * 10**12 / 2  # operations of attention where it grows with the square
    assert more - less == pytest.approx((2 * inside * 10**6 + full) / H100.flops("bfloat16"), rel=1e-3)


def test_heads_of_fp8_targets_have_16_bits():
    for kind in ("eagle", "eagle3"):
        assert drafter(kind, FLOAT8).model.bytes == drafter(kind, HALF).model.bytes
    assert drafter("mtp", FLOAT8).model.bytes < drafter("mtp", HALF).model.bytes


def test_a_dtype_of_weights_is_no_dtype_of_activations():
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("dtype", "float8")):
        CostModel(H100, HALF, dtype="float8")
