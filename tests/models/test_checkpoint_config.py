"""Fields of config.json: every published spelling is read, and errors name bad ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from specsim.core.errors import InputError
from specsim.core.target import DenseMLP, ModelConfig
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.model_config import model_config, read_target_config
from specsim.models.drafters import eagle, eagle3

EAGLE = "eagle-llama2-chat-7b"
EAGLE3 = "eagle3-llama3.1-instruct-8b"
SPECULATORS = "eagle3-llama3.1-8b-speculators"
IDS = "eagle_aux_hidden_state_layer_ids"
CONVENTION = "eagle_aux_hidden_state_convention"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fields", "theta", "scaling"),
    [
        ({}, 10000.0, {}),
        ({"rope_theta": 500000, "rope_scaling": None}, 500000.0, {}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, 5.0, {}),
        ({"rope_theta": 5.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, 5.0, LLAMA3),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "llama3", **LLAMA3}}, 5.0, LLAMA3),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5.0, **LLAMA3}}, 5.0, LLAMA3),
        (
            {
                "rope_theta": 5.0,
                "rope_scaling": {"type": "llama3", **LLAMA3},
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5.0, **LLAMA3},
            },
            5.0,
            LLAMA3,
        ),
    ],
)
def test_rope_spellings(fields: dict[str, Any], theta: float, scaling: dict[str, float], published):
    config = model_config(Fields(Path("config.json"), published.small("llama", **fields)))
    assert config.rope.theta == theta
    assert config.rope.scaling == ({"rope_type": "llama3"} | scaling if scaling else {})


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("llama", {"sliding_window": 5}, (None,) * 4),
        ("llama", {"sliding_window": 5, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        ("mistral", {"sliding_window": 5}, (5, 5, 5, 5)),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("mistral", {}, (4096,) * 4),
        ("mistral", {"sliding_window": 5, "layer_types": ["full_attention"] * 4}, (None,) * 4),
        (
            "mistral",
            {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
            (5, None, 5, None),
        ),
        ("qwen3", {"sliding_window": 5, "max_window_layers": 2}, (None,) * 4),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 2}, (None,) * 4),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}, (None, None, 5, 5)),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 5,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (5, None, 5, None),
        ),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["full_attention"] * 4},
            (None,) * 4,
        ),
    ],
)
def test_sliding_windows(family: str, fields: dict[str, Any], expected: tuple, published):
    assert model_config(Fields(Path("config.json"), published.small(family, **fields))).sliding_windows == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"num_key_value_heads": None}, (4, 6)), ({"head_dim": None}, (2, 6)), ({"head_dim": 8}, (2, 8))],
)
def test_heads_not_given(fields: dict[str, Any], expected: tuple[int, int], published):
    config = model_config(Fields(Path("config.json"), published.small("llama", **fields)))
    assert (config.num_kv_heads, config.head_dim) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (2, 18, 33)),
        ({IDS: None}, (2, 18, 33)),
        ({IDS: [1, 4, 35], CONVENTION: "entering"}, (1, 4, 35)),
        ({IDS: [0, 17, 34], CONVENTION: "output"}, (1, 18, 35)),
        ({IDS: [0, 17, 34], CONVENTION: "entering"}, (0, 17, 34)),  # the embedding enters layer 0
        ({IDS: [-1, 17, 34], CONVENTION: "output"}, (0, 18, 35)),
        ({IDS: [5], CONVENTION: "entering"}, (5,)),
        ({IDS: [8, 20, 36]}, (8, 20, 36)),  # an output has no id 36, so these are inputs, the last of the final norm
        ({IDS: [1, 9, 17, 32], CONVENTION: "output", "num_aux_hidden_states": 4}, (2, 10, 18, 33)),
        ({"eagle_config": {IDS: [1, 17, 32], CONVENTION: "output", "use_aux_hidden_state": True}}, (2, 18, 33)),
    ],
)
def test_feature_layers(fields: dict[str, Any], expected: tuple[int, ...], published):
    config = Fields(Path("config.json"), published.config(EAGLE3) | fields)
    assert eagle3.read_config(config, published.target()).feature_layers == expected


@pytest.mark.parametrize(("convention", "expected"), [(None, (2, 18, 33)), ("output", (3, 19, 34))])
def test_ids_of_speculators_name_inputs(convention: str | None, expected: tuple[int, ...], published):
    """Its own code and vLLM read them so, and it saves no convention."""
    fields = published.config(SPECULATORS) | {IDS: [2, 18, 33], CONVENTION: convention}
    assert eagle3.read_config(Fields(Path("config.json"), fields), published.target()).feature_layers == expected


@pytest.mark.parametrize("value", [True, False])
def test_norm_before_residual(value: bool, published):
    for name in (EAGLE3, SPECULATORS):
        config = Fields(Path("config.json"), published.config(name) | {"norm_before_residual": value})
        assert eagle3.read_config(config, published.target()).norm_before_residual is value


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"sliding_window": 5, "use_sliding_window": True}, (None,)),  # as transformers' Llama reads it
        ({"sliding_window": 5, "layer_types": ["full_attention"]}, (None,)),
        ({"sliding_window": 5, "layer_types": ["sliding_attention"]}, (5,)),
    ],
)
def test_windows_of_a_head(fields: dict[str, Any], expected: tuple, published):
    config = Fields(Path("config.json"), published.config(EAGLE3) | fields)
    assert eagle3.read_config(config, published.target()).model.sliding_windows == expected


@pytest.mark.parametrize("name", ["norm_before_fc", "fc_norm", "norm_output"])
def test_norms_of_eagle3_1(name: str, published):
    for head in (EAGLE3, SPECULATORS):
        for fields in ({name: True}, {"eagle_config": {name: True}}):
            config = Fields(Path("config.json"), published.config(head) | {"norm_before_residual": True} | fields)
            assert getattr(eagle3.read_config(config, published.target()), name) is True
        assert getattr(eagle3.read_config(Fields(Path("c"), published.config(head)), published.target()), name) is False


# Refused fields


@pytest.mark.parametrize(
    ("family", "fields", "field", "value"),
    [
        ("gpt2", {}, "model_type", "gpt2"),
        ("llama", {"model_type": None}, "model_type", "missing"),
        ("llama", {"hidden_size": None}, "hidden_size", "missing"),
        ("llama", {"vocab_size": "40"}, "vocab_size", "40"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers", 0),
        ("llama", {"rms_norm_eps": -1}, "rms_norm_eps", -1),
        ("llama", {"rms_norm_eps": None}, "rms_norm_eps", "missing"),
        ("llama", {"attention_bias": 1}, "attention_bias", 1),
        ("llama", {"hidden_act": "gelu"}, "hidden_act", "gelu"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads", 3),
        ("llama", {"head_dim": 5}, "head_dim", 5),
        ("llama", {"head_dim": None, "num_attention_heads": 5}, "num_attention_heads", 5),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "original_max_position_embeddings",
            "missing",
        ),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type", "linear"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_scaling": {"type": "longrope"}},
            "rope_type",
            "longrope",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 10000.0}, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            "rope_scaling",
            ...,
        ),
        ("llama", {"rope_scaling": "x"}, "rope_scaling", "x"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor", "missing"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 2.0, "full_attention": {"rope_theta": 1.0}}},
            "rope_parameters",
            {"rope_theta": 2.0, "full_attention": {"rope_theta": 1.0}},
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
            0.5,
        ),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config", {"quant_method": "fp8"}),
        ("llama", {"eos_token_id": "</s>"}, "eos_token_id", "</s>"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types", ["full_attention"]),
        ("llama", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 4}, "layer_types", ...),
        ("llama", {"layer_types": 4}, "layer_types", 4),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "use_sliding_window", "missing"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": -1}, "max_window_layers", -1),
        ("mistral", {"sliding_window": 0}, "sliding_window", 0),
    ],
)
def test_configs_of_targets_refused(
    family: str, fields: dict[str, Any], field: str, value: Any, tmp_path: Path, published
):
    (tmp_path / "config.json").write_text(json.dumps(published.small(family) | fields))
    with pytest.raises(InputError) as caught:
        read_target_config(tmp_path)
    assert caught.value.name.removesuffix(f" in {tmp_path / 'config.json'}") == field
    assert value in (..., caught.value.value)


@pytest.mark.parametrize(
    ("name", "fields", "field", "value"),
    [
        (EAGLE, {"model_type": "gemma3_text"}, "model_type", "gemma3_text"),
        (EAGLE, {"model_type": "phi3", "architectures": ["Phi3ForCausalLM"]}, "model_type", "phi3"),
        (SPECULATORS, {"transformer_layer_config": {"model_type": "phi3"}}, "model_type", "phi3"),
        (EAGLE, {"hidden_size": 32}, "hidden_size", 32),
        (EAGLE, {"vocab_size": 41}, "vocab_size", 41),
        (EAGLE3, {"vocab_size": 41}, "vocab_size", 41),
        (EAGLE3, {"hidden_size": 32}, "hidden_size", 32),
        (EAGLE3, {"target_hidden_size": 28}, "target_hidden_size", 28),
        (EAGLE3, {"draft_vocab_size": 41}, "draft_vocab_size", 41),
        (EAGLE3, {"eagle_config": {"next_layer_regular": True}}, "eagle_config", "next_layer_regular"),
        (EAGLE3, {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step", 4),
        (
            EAGLE3,
            {"model_type": "qwen3", "architectures": None, "use_sliding_window": True, "sliding_window": 5},
            "layer_types",
            "missing",
        ),
        (EAGLE, {"norm_before_fc": True}, "norm_before_fc", True),
        (EAGLE, {"norm_output": True}, "norm_output", True),
        (EAGLE3, {"fc_norm": 1}, "fc_norm", 1),
        (EAGLE3, {"num_aux_hidden_states": 2}, "num_aux_hidden_states", 2),
        (EAGLE3, {"layer_types": "sliding_attention"}, "layer_types", "sliding_attention"),
        (EAGLE3, {"layer_types": ["sliding_attention"] * 2}, "layer_types", ["sliding_attention"] * 2),
        (EAGLE3, {"layer_types": ["sliding_attention"]}, "sliding_window", "missing"),
        (EAGLE3, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state", False),
        (EAGLE3, {IDS: [1, 17, 32]}, CONVENTION, "missing"),
        (EAGLE3, {IDS: [1, 2, 3], CONVENTION: "vllm"}, CONVENTION, "vllm"),
        (EAGLE3, {IDS: [2, 2, 3], CONVENTION: "output"}, IDS, [2, 2, 3]),
        (EAGLE3, {IDS: [3, 2, 4], CONVENTION: "output"}, IDS, [3, 2, 4]),
        (EAGLE3, {IDS: [], CONVENTION: "output"}, IDS, []),
        (EAGLE3, {IDS: [1, 2, 35], CONVENTION: "output"}, IDS, [1, 2, 35]),
        (EAGLE3, {IDS: [-1, 2, 3], CONVENTION: "entering"}, IDS, [-1, 2, 3]),
        (EAGLE3, {IDS: [-2, 2, 3], CONVENTION: "output"}, IDS, [-2, 2, 3]),
        (EAGLE3, {IDS: "2", CONVENTION: "entering"}, IDS, "2"),
        (SPECULATORS, {"norm_before_residual": None}, "norm_before_residual", "missing"),
    ],
)
def test_configs_of_heads_refused(name: str, fields: dict[str, Any], field: str, value: Any, published):
    config = Fields(Path("config.json"), published.config(name) | fields)
    with pytest.raises(InputError) as caught:
        (eagle if name == EAGLE else eagle3).read_config(config, published.target())
    assert (caught.value.name, caught.value.value) == (f"{field} in config.json", value)


@pytest.mark.parametrize("num_layers", [1, 4, 6])
def test_a_short_target_must_name_its_feature_layers(num_layers: int, published):
    target = model_config(Fields(Path("config.json"), published.small("llama", num_hidden_layers=num_layers)))
    config = Fields(Path("config.json"), published.config(EAGLE3))
    with pytest.raises(InputError) as caught:
        eagle3.read_config(config, target)
    assert (caught.value.name, caught.value.value) == (f"{IDS} in config.json", "missing")
    assert str((2, num_layers // 2, num_layers - 3)) in caught.value.allowed  # the published default


def test_a_field_of_the_wrong_type_is_one_sentence(published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(published.small("llama", vocab_size="40")))
    with pytest.raises(InputError) as caught:
        read_target_config(Path())
    assert str(caught.value) == "vocab_size in config.json is '40'; allowed: an integer of at least 1"


# Families beyond dense attention

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {
    "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5,
    "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8, "n_group": 4,
    "topk_group": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2}
OF_FAMILY = {"qwen3_moe": EXPERTS, "deepseek_v3": LATENT, "gpt_oss": GPT_OSS}


def read(family: str, published, **fields: Any) -> ModelConfig:
    return model_config(Fields(Path("config.json"), published.small(family, **OF_FAMILY.get(family, {}) | fields)))


def test_layers_with_experts(published):
    assert read("qwen3_moe", published).expert_layers == (0, 1, 2, 3)
    assert read("qwen3_moe", published, mlp_only_layers=[1], decoder_sparse_step=2).expert_layers == (3,)
    assert read("qwen3_moe", published, decoder_sparse_step=5).mlp == DenseMLP(20)
    assert read("deepseek_v3", published).expert_layers == (1, 2, 3)
    assert read("gpt_oss", published).sliding_windows == (128, None, 128, None)


@pytest.mark.parametrize(
    ("family", "name", "value", "other"),
    [
        ("qwen3", "rope_scaling", {"type": "linear", "factor": 1.0}, {"type": "linear", "factor": 2.0}),
        ("mistral", "rope_scaling", {"rope_type": "dynamic", "factor": 1}, {"rope_type": "dynamic"}),
        (
            "llama",
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}},
            {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e5}},
        ),
        ("llama", "partial_rotary_factor", 1.0, 0.5),
        ("deepseek_v3", "partial_rotary_factor", 1, 0.25),
        ("qwen3", "max_window_layers", None, None),
        ("qwen2", "moe_intermediate_size", 0, 12),
        ("deepseek_v3", "num_local_experts", 8, 4),
        ("deepseek_v3", "num_experts", 8, 4),
    ],
)
def test_settings_that_change_nothing_are_accepted(family, name, value, other, published):
    plain = read(family, published, rope_theta=1e4)
    assert read(family, published, **{"rope_theta": 1e4, name: value}) == plain
    if other is not None:
        with pytest.raises(InputError, match=f"{'rope_type' if name == 'rope_scaling' else name} in config.json is "):
            read(family, published, **{name: other})


def test_sizes_of_no_experts_are_not_read(published):
    dead = {"moe_intermediate_size": 12, "num_experts_per_tok": 2, "num_experts": 0}
    assert read("qwen2", published, **dead) == read("qwen2", published)


@pytest.mark.parametrize(
    ("family", "fields", "field"),
    [
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("llama", {"kv_lora_rank": 512}, "kv_lora_rank"),
        ("qwen3", {"moe_intermediate_size": 64}, "moe_intermediate_size"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("mistral", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 16}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"num_local_experts": 5}, "num_local_experts"),
        ("qwen3_moe", {"mlp_only_layers": [4]}, "mlp_only_layers"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("gpt_oss", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("qwen3_moe", {"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        *(
            (family, {"layer_types": [kind] * 4}, "layer_types")
            for family, kind in (("gpt_oss", "chunked_attention"), ("deepseek_v3", "sliding_attention"))
        ),
        ("qwen3_moe", {"sliding_window": 5, "layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"n_group": 3}, "n_group"),
        ("deepseek_v3", {"topk_group": 5}, "topk_group"),
        ("deepseek_v3", {"index_topk": 2048}, "index_topk"),
        ("deepseek_v3", {"qk_rope_head_dim": 3}, "qk_rope_head_dim"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ("llama", {"hidden_size": 10**12}, "hidden_size"),
        ("qwen3_moe", {"num_experts": 10**6}, "num_experts"),
    ],
)
def test_configs_of_other_computations_refused(family: str, fields: dict[str, Any], field: str, published):
    with pytest.raises(InputError, check=lambda error: error.name.removesuffix(" in config.json") == field):
        read(family, published, **fields)


def test_queries_of_latent_attention_must_be_told_apart(published):
    """transformers reads an absent q_lora_rank as 1536, and null as one projection."""
    fields = published.small("deepseek_v3", **LATENT)
    del fields["q_lora_rank"]
    with pytest.raises(InputError, check=lambda error: error.name == "q_lora_rank in config.json"):
        model_config(Fields(Path("config.json"), fields))
