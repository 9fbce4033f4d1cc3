"""Roofline bounds of forwards and rounds, by hand."""

import math
from dataclasses import replace

import pytest

from specsim.bench.linears import product_bound, shapes
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes, forward_bound, round_bound
from specsim.core.config import SpecConfig
from specsim.core.eagle import Eagle3Config, EagleConfig
from specsim.models.checkpoint.layout import target_layout
from specsim.models.tiny_config import tiny_config

MODEL = tiny_config(
    vocab_size=10, hidden_size=4, intermediate_size=6, num_heads=2, num_kv_heads=1, head_dim=2,
    max_position_embeddings=64,
)  # fmt: skip
HEAD = Eagle3Config(replace(MODEL, layers=MODEL.layers[:1]), 7, 4, (0, 1, 1))
LAYER = {  # entries of each weight
    "input_layernorm": 4, "post_attention_layernorm": 4, "self_attn.q_proj": 16, "self_attn.k_proj": 8,
    "self_attn.v_proj": 8, "self_attn.o_proj": 16, "mlp.gate_proj": 24, "mlp.up_proj": 24, "mlp.down_proj": 24,
}  # fmt: skip
TREE = SpecConfig(topk=2, num_steps=3, num_draft_tokens=5, page_size=4)


def parts_of(bound: RooflineBound) -> dict[str, tuple[int, int]]:
    return {part.tensor: (part.count, part.bytes) for part in bound.parts}


def test_bound_of_a_forward_by_hand():
    bound = forward_bound(MODEL, requests=2, rows=3, seq_len=8)
    assert parts_of(bound) == {
        "model.embed_tokens.weight": (1, 2 * 6 * 4),  # the rows that are looked up
        "model.norm.weight": (1, 2 * 4),
        "lm_head.weight": (1, 2 * 40),
        **{f"model.layers.*.{name}.weight": (2, 2 * 2 * size) for name, size in LAYER.items()},
        "target KV of layer *, keys": (2, 2 * 2 * 2 * 8 * 2),
        "target KV of layer *, values": (2, 2 * 2 * 2 * 8 * 2),
    }
    products = 2 * (16 + 8 + 8 + 16 + 3 * 24) + 40
    attended = 2 * 2 * 3 * 8 * 2 * 2  # layers, requests, rows, columns, heads, head size
    assert bound.operations == 2 * 6 * products + 4 * attended


def test_bound_of_a_plain_decode_of_llama_3_8b():
    from specsim.models.shapes import shape

    model = shape("llama-3-8b").config
    bound = forward_bound(model, 1, 1, 1024)
    weights = sum(math.prod(size) for size in target_layout(model).values()) - 128256 * 4096 + 4096
    assert bound.bytes == 2 * weights + 2 * 32 * 2 * 1024 * 8 * 128
    assert bound.bytes == pytest.approx(15.0e9 + 0.134e9, rel=1e-2)


def test_bound_of_a_round_reads_the_drafter_once_a_forward():
    bound = parts_of(round_bound(MODEL, HEAD, TREE, requests=1, seq_len=8))
    target = parts_of(forward_bound(MODEL, 1, 5, 8))
    assert {name: bound[name] for name in target} == target
    drafter = {name: each for name, each in bound.items() if name not in target}
    midlayer = LAYER | {"hidden_norm": 4, "self_attn.q_proj": 32, "self_attn.k_proj": 16, "self_attn.v_proj": 16}
    # Two steps and the draft-extend; only that reads the features' fc. Rows looked up: 2 + 2 + 4.
    assert drafter == {
        **{f"drafter midlayer.{name}.weight": (3, 3 * 2 * size) for name, size in midlayer.items()},
        "drafter norm.weight": (3, 3 * 8),
        "drafter lm_head.weight": (3, 3 * 2 * 28),
        "drafter fc.weight": (1, 2 * 48),
        "drafter target embed_tokens.weight": (3, 2 * (2 + 2 + 4) * 4),
        "drafter KV of layer *, keys": (3, 3 * 2 * 8 * 2),
        "drafter KV of layer *, values": (3, 3 * 2 * 8 * 2),
    }


def test_an_eagle_head_reads_the_targets_vocabulary():
    head = EagleConfig(replace(MODEL, layers=MODEL.layers[:1]), 10, 4)
    bound = parts_of(round_bound(MODEL, head, TREE, 1, 8))
    assert bound["drafter target lm_head.weight"] == (3, 3 * 2 * 40)
    assert bound["drafter fc.weight"] == (3, 3 * 2 * 32)  # of embedding and feature: every forward has both


def test_a_plain_round_is_a_forward():
    assert round_bound(MODEL, None, SpecConfig.plain(), 3, 8) == forward_bound(MODEL, 3, 1, 8)


def test_time_of_a_bound_is_the_larger_of_bytes_and_operations():
    peaks = Peaks(read=2e6, copy=1.0, dense=5e6)
    assert RooflineBound((TensorBytes("a", 4), TensorBytes("b", 6)), 5).us(peaks) == 5
    assert RooflineBound((TensorBytes("a", 4),), 100).us(peaks) == 20


def test_products_of_a_layer_have_the_shapes_of_its_tensors():
    assert shapes(MODEL) == {"qkv": (8, 4), "o": (4, 4), "gate-up": (12, 4), "down": (4, 6), "lm_head": (10, 4)}
    assert product_bound(3, 8, 4).bytes == 2 * (32 + 12 + 24)
    assert product_bound(3, 8, 4).operations == 2 * 3 * 32
