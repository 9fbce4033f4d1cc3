"""Fields that a drafter's config.json may leave to its target."""

from typing import Any

from specsim.core.target import DenseMLP, HeadAttention, ModelConfig
from specsim.models.checkpoint.fields import Fields
from specsim.models.checkpoint.model_config import model_config

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
    return model_config(Fields(fields.file, {**values, **fields.given}, fields.read_names))


def one_window(config: ModelConfig) -> int | None:
    """Find the window of every layer, None where layers differ or have none."""
    windows = set(config.sliding_windows)
    return windows.pop() if len(windows) == 1 else None
