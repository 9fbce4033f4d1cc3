"""Heads of drafters: the weights of one layer of each kind."""

from dataclasses import replace

import pytest

from specsim.core.errors import InputError
from specsim.simulator import drafter, model

# Qwen/Qwen3-235B-A22B's config.json
QWEN = {
    "model_type": "qwen3_moe",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
}
H, WIDTH, VOCAB = 4096, 12288, 32000
ENTERING = (64 + 2 * 4) * 128 * H  # q, k and v from H numbers
OUT = 64 * 128 * H


def test_eagle_heads_of_expert_models_are_one_dense_layer():
    target = model(QWEN)
    eagle3, eagle = drafter("eagle3", target, VOCAB).model, drafter("eagle", target).model
    assert eagle3.parameters == 3 * H**2 + 2 * ENTERING + OUT + 3 * H * WIDTH + VOCAB * H
    assert eagle.parameters == 2 * H**2 + ENTERING + OUT + 3 * H * WIDTH + target.vocab_size * H
    assert [each.layers[0].experts for each in (eagle3, eagle)] == [0, 0]
    assert eagle3.layers[0].kernels == model("llama-3-8b").layers[0].kernels


def test_a_head_may_be_wider_than_the_config():
    """SpecForge's configs/qwen3-235B-A22B-eagle3.json has 24576."""
    target = model(QWEN)
    usual, wide = (drafter("eagle3", target, VOCAB, width).model for width in (None, 24576))
    assert wide.parameters - usual.parameters == 3 * H * 12288
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == ("intermediate_size", 0)):
        drafter("eagle3", target, VOCAB, 0)


def test_an_mtp_layer_keeps_the_experts_of_its_target():
    target = model(QWEN)
    last = replace(target.layers[-1], count=1)
    assert drafter("mtp", target).model.parameters == last.weights + 2 * H**2 + target.head_weights
