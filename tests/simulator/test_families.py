"""Families of models: weights and windows, compared with transformers' models, and refused configs."""

import pytest

from specsim.core.errors import InputError
from specsim.simulator import model
from specsim.simulator.layers import FAMILIES

SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = EXPERTS | {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "num_key_value_heads": 6,
    "n_routed_experts": 4,
}
GLM = EXPERTS | {"model_type": "glm4_moe", "n_routed_experts": 4}
OTHER = {
    "mixtral": EXPERTS | {"num_local_experts": 4},
    "minimax_m2": EXPERTS | {"num_local_experts": 4},
    "gpt_oss": EXPERTS | {"num_local_experts": 4},
    "olmoe": EXPERTS | {"num_experts": 4},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 56, "decoder_sparse_step": 2},
    "qwen3_moe": EXPERTS | {"num_experts": 4, "mlp_only_layers": [3, 4]},
    "qwen3_vl_text": {"tie_word_embeddings": False},
    "qwen3_vl_moe_text": EXPERTS | {"num_experts": 4, "tie_word_embeddings": False},
    "deepseek_v2": LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 2},
    "deepseek_v3": LATENT | {"q_lora_rank": 20, "first_k_dense_replace": 3, "n_group": 2, "topk_group": 1},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 2},
    "glm4_moe_lite": LATENT | {"q_lora_rank": 20},
    "llama4_text": EXPERTS | {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 88},
    "gpt_neox": {"num_key_value_heads": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 5},
    "gemma3_text": {"sliding_window_pattern": 3},
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "kimi_k2"])
def test_layers_are_those_of_transformers(name):
    """kimi_k2 is deepseek_v3 by another name, with code of its own."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(name, **TOKENS, **SMALL | OTHER.get(name, {}))
    has_head = type(config) in transformers.AutoModelForCausalLM._model_mapping
    auto = transformers.AutoModelForCausalLM if has_head else transformers.AutoModel
    with torch.device("meta"):
        made = auto.from_config(config)
    sizes = {key: weight.numel() for key, weight in made.named_parameters() if weight.ndim > 1}
    counted = {key: size for key, size in sizes.items() if not key.endswith(("bias", "shared_expert_gate.weight"))}
    written = config.to_diff_dict() | {"model_type": name}
    ours = model(written)
    assert ours.parameters == sum(counted.values()) + (0 if has_head else ours.head_weights)
    sparse = [any(f"layers.{layer}." in key and ".experts" in key for key in sizes) for layer in range(8)]
    assert [group.experts > 0 for group in ours.layers for _ in range(group.count)] == sparse
    window = getattr(config, "attention_chunk_size", None) or getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 8
    expected = [window if kind != "full_attention" else None for kind in kinds] if window else [None] * 8
    assert [group.window for group in ours.layers for _ in range(group.count)] == expected


def test_llama_4_has_the_active_weights_of_its_name():
    scout = {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "attention_chunk_size": 8192,
        "vocab_size": 202048,
    }
    maverick = scout | {"num_local_experts": 128, "interleave_moe_layer_step": 2}
    for config, billions in ((scout, 109), (maverick, 400)):
        target = model({"model_type": "llama4", "text_config": config})
        assert target.parameters / 1e9 == pytest.approx(billions, rel=0.02)
        assert (target.active_parameters + target.embedding_weights) / 1e9 == pytest.approx(17, rel=0.02)
        assert sum(group.count for group in target.layers if group.window is None) == 12


def test_formats_and_ties_may_be_outside_the_text_config():
    text = SMALL | {"model_type": "qwen3"}
    inside, outside = (
        model({"text_config": text | each[0]} | each[1])
        for each in (
            ({"quantization_config": {"quant_method": "fp8"}, "tie_word_embeddings": True}, {}),
            ({}, {"quantization_config": {"quant_method": "fp8"}, "tie_word_embeddings": True}),
        )
    )
    assert inside == outside != model({"text_config": text})


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ({"model_type": "qwen3_next"}, "model_type", "qwen3_next"),
        ({"model_type": "jamba"}, "model_type", "jamba"),
        ({"model_type": "deepseek_v32"}, "model_type", "deepseek_v32"),
        ({"model_type": None}, "model_type", None),
        ({"model_type": ["llama"]}, "model_type", ["llama"]),
        ({"num_local_experts": 4}, "model_type", "llama"),
        ({"model_type": "qwen3_moe"}, "num_experts", None),
        ({"layer_types": ["linear_attention"] * 7 + ["full_attention"]}, "layer_types", "linear_attention"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types", "7 layers"),
        ({"layer_types": "full_attention"}, "layer_types", "full_attention"),
        ({"quantization_config": {"quant_method": ["fp8"]}}, "quantization_config", ["fp8"]),
        ({"text_config": [1]}, "text_config", [1]),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers", 10**9),
        ({"num_attention_heads": 2**20}, "num_attention_heads", 2**20),
        ({"hidden_size": 2**40}, "hidden_size", 2**40),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings", "false"),
        ({"use_sliding_window": "false"}, "use_sliding_window", "false"),
        (GLM | {"n_routed_experts": 10**9}, "num_experts", 10**9),
        (GLM | {"n_shared_experts": "x"}, "n_shared_experts", "x"),
        (
            GLM | {"mlp_layer_types": ["moe"] * 8},
            "mlp_layer_types",
            "moe",
        ),
    ],
)
def test_a_config_that_is_not_understood_is_refused_by_name(change, name, value):
    with pytest.raises(InputError, check=lambda error: (error.name, error.value) == (name, value)):
        model({"model_type": "llama"} | SMALL | change)
