"""Shape of a target, from its config.json, and fields that a drafter's may leave to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specsim.core.limits import MOST_LAYERS
from specsim.core.target import FAMILIES, DenseMLP, HeadAttention, LayerConfig, ModelConfig
from specsim.models.checkpoint.fields import Fields, read_json
from specsim.models.checkpoint.layer_fields import read_attention, read_mlps

# Defaults of transformers for absent fields; null ones have none. Sizes have no default.
_QWEN = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_ABSENT = {
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rope_theta": 150000.0},
    "qwen3_moe": {"num_key_value_heads": 4},
}
# transformers' GptOssConfig has it where a file names no scaling, even for null.
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
# Fields of other architectures, which change what a model computes: refused unless the family reads them.
_STRUCTURAL = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "n_shared_experts",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts_per_tok",
    "kv_lora_rank",
    "q_lora_rank",
    "index_topk",
    "attention_chunk_size",
    "no_rope_layers",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "query_pre_attn_scalar",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
    "logits_scaling",
    "logit_scale",
    "clip_qkv",
    "use_qk_norm",
    "use_mrope",
    "attn_output_gate",
    "full_attention_interval",
    "linear_num_value_heads",
    "mamba_d_state",
    "num_kv_shared_layers",
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_target_config(folder: Path) -> ModelConfig:
    """Read the shape of a folder's target.

    End tokens of generation_config.json take precedence, as in transformers.
    """
    fields = language_fields(read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    ends = _end_tokens(read_json(generation)) if generation.exists() else ()
    return model_config(fields, ends or _end_tokens(fields))


def language_fields(fields: Fields) -> Fields:
    """Give the fields of the language model in a multimodal config, `text_config`; of another config all of them."""
    if fields.values.get("model_type") in FAMILIES or not fields.values.get("text_config"):
        return fields
    text = fields.mapping("text_config").filled({"eos_token_id": fields.values.get("eos_token_id")})
    ties = fields.values.get("tie_word_embeddings")  # the whole model's, which transformers asks
    return text if ties is None else text.replaced({"tie_word_embeddings": ties})


def model_config(fields: Fields, eos_token_ids: tuple[int, ...] = ()) -> ModelConfig:
    """Read the shape of a decoder from a config.json of transformers 4 or 5."""
    family = fields.choice("model_type", FAMILIES)
    fields.choice("hidden_act", ("silu",), default="silu")
    _refuse_quantised(family, fields)
    fields = fields.filled(_ABSENT.get(family, {}))
    if family == "gpt_oss" and not any(fields.get(name) for name in ("rope_scaling", "rope_parameters")):
        fields = fields.replaced({"rope_scaling": _GPT_OSS_YARN})
    num_layers = fields.integer("num_hidden_layers", most=MOST_LAYERS)
    mlps = read_mlps(family, fields, num_layers)
    layers = zip(read_attention(family, fields, num_layers), mlps, strict=True)
    _refuse_unread(family, fields, num_layers)
    return ModelConfig(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        rms_norm_eps=fields.number("rms_norm_eps"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        layers=tuple(LayerConfig(attention, mlp) for attention, mlp in layers),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        eos_token_ids=eos_token_ids,
    )


def _refuse_quantised(family: str, fields: Fields) -> None:
    """Raise InputError for quantised weights other than experts in MXFP4."""
    settings = fields.get("quantization_config")
    is_mxfp4 = isinstance(settings, Mapping) and settings.get("quant_method") == "mxfp4"
    if settings and not (is_mxfp4 and family == "gpt_oss"):
        allowed = "none, as weights are in floating point, or MXFP4 for experts of gpt_oss"
        raise fields.error("quantization_config", allowed)


def _refuse_unread(family: str, fields: Fields, num_layers: int) -> None:
    """Refuse fields that belong to another architecture, which would silently be read as a plain model.

    A field that states what the family's forward does anyway is no obstacle.
    """
    implied = _implied(family, fields, num_layers)
    for name in _STRUCTURAL:
        value = fields.values.get(name)
        is_neutral = not value or (value == 1 and value is not True) or (name in implied and value == implied[name])
        if name not in fields.read_names and not is_neutral:
            raise fields.error(name, f"absent in a {family} model")


def _implied(family: str, fields: Fields, num_layers: int) -> dict[str, Any]:
    """List values of structural fields that a family's forward has without them, or that nothing reads."""
    values = fields.values
    implied: dict[str, Any] = {"no_rope_layers": [1] * num_layers}
    if family == "deepseek_v3":
        implied |= dict.fromkeys(_EXPERT_COUNTS, values.get("n_routed_experts"))
    if any(values.get(name) == 0 for name in _EXPERT_COUNTS) and not any(map(values.get, _EXPERT_COUNTS)):
        implied |= {name: values.get(name) for name in ("moe_intermediate_size", "num_experts_per_tok")}
    if family in ("qwen3", "qwen3_moe"):
        implied["use_qk_norm"] = True
    heads, size = fields.values.get("num_attention_heads"), fields.values.get("hidden_size")
    head_dim = fields.values.get("head_dim") or (size // heads if type(size) is type(heads) is int and heads else None)
    if type(head_dim) is int and head_dim > 0:
        implied |= {"query_pre_attn_scalar": head_dim, "attention_multiplier": head_dim**-0.5}
    return implied


def _end_tokens(fields: Fields) -> tuple[int, ...]:
    ends = fields.get("eos_token_id", [])
    ends = ends if isinstance(ends, list) else [ends]
    if any(type(end) is not int for end in ends):
        raise fields.error("eos_token_id", "an integer, a list of integers or null")
    return tuple(ends)


_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
_WINDOWS = ("sliding_window", "use_sliding_window", "layer_types", "max_window_layers")


def target_sizes(fields: Fields, target: ModelConfig) -> dict[str, Any]:
    """List the target's sizes by the names of config.json, with those of heads unless the drafter has its own.

    Sizes that a target of experts or latent attention does not have are left out.
    """
    names = ("vocab_size", "hidden_size", "rms_norm_eps", "max_position_embeddings")
    sizes = {name: getattr(target, name) for name in names}
    last = target.layers[-1]
    if isinstance(last.mlp, DenseMLP):
        sizes["intermediate_size"] = last.mlp.size
    if isinstance(last.attention, HeadAttention) and not fields.get("num_attention_heads"):
        heads = last.attention
        sizes |= {"num_attention_heads": heads.num_heads, "num_key_value_heads": heads.num_kv_heads}
        sizes["head_dim"] = heads.head_dim
    return sizes


def decoder_config(fields: Fields, target: ModelConfig) -> ModelConfig:
    """Read the shape of a drafter's layers, which are the target's in everything that its config.json leaves out."""
    values: dict[str, Any] = {"model_type": target.family, "num_hidden_layers": 1, **target_sizes(fields, target)}
    values |= {"attention_bias": target.heads.bias, "mlp_bias": target.mlp.bias}
    if not any(fields.get(name) for name in _ROPE):
        scaling = dict(target.rope.scaling) or {"rope_type": "default"}
        values["rope_parameters"] = {"rope_theta": target.rope.theta, **scaling}
    if not any(fields.get(name) for name in _WINDOWS):
        window = one_window(target)
        values |= {"sliding_window": window, "use_sliding_window": window is not None, "max_window_layers": 0}
    return model_config(Fields(fields.file, {**values, **fields.non_null}, fields.read_names))


def one_window(config: ModelConfig) -> int | None:
    """Find the window of every layer, None where layers differ or have none."""
    windows = set(config.sliding_windows)
    return windows.pop() if len(windows) == 1 else None
