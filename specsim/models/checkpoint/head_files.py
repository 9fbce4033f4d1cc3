"""EAGLE-3 and P-EAGLE heads as files, in the layout of the EAGLE repository or in that of speculators.

Sources: SafeAILab/EAGLE (`midlayer`, a flat config.json); vllm-project/speculators (`layers.0`, the layer's fields in
`transformer_layer_config`).
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from specsim.core.drafter import DrafterConfig
from specsim.core.errors import InputError, require, require_choice
from specsim.core.pair import DrafterCheckpoint
from specsim.core.target import ModelConfig

LayoutName = Literal["eagle", "speculators"]
_SPECULATORS = {"eagle3": "eagle3", "p-eagle": "peagle"}


def head_fields(config: DrafterConfig, layout: str) -> dict[str, Any]:
    """Make the config.json of a head.

    Feature layers are given as entered, with the name of this convention, which both layouts leave open.
    """
    require_choice("layout", layout, get_args(LayoutName))
    allowed = f"a drafter of kind {' or '.join(_SPECULATORS)}, as no other has both layouts"
    require(config.kind in _SPECULATORS, "draft", config.kind, allowed)
    fields: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "eagle_aux_hidden_state_convention": "entering",
    }
    fields |= {name: True for name in ("norm_before_fc", "fc_norm", "norm_output") if getattr(config, name)}
    if config.kind == "p-eagle":
        fields |= {"parallel_drafting": True, "mask_token_id": config.mask_token_id}
    layer = _layer_fields(config.model)
    if layout == "speculators":
        kind = {"speculators_model_type": _SPECULATORS[config.kind]}
        return kind | fields | {"transformer_layer_config": layer}
    return {"architectures": ["LlamaForCausalLMEagle3"]} | layer | fields


def head_tensors(checkpoint: DrafterCheckpoint, layout: str) -> dict[str, torch.Tensor]:
    """Name the tensors of a head as a layout does; none is changed."""
    first = "midlayer." if layout == "eagle" and checkpoint.config.kind == "eagle3" else "layers.0."
    return {
        f"{first}{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name: tensor
        for name, tensor in checkpoint.tensors.items()
    }


def _layer_fields(model: ModelConfig) -> dict[str, Any]:
    """List the sizes of a head's layers, as of a Llama."""
    windows = {window for window in model.sliding_windows if window is not None}
    if len(windows) > 1:
        raise InputError("sliding_window", sorted(windows), "one window in all layers that have any")
    heads = model.heads
    fields: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp.size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": heads.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "max_position_embeddings": model.max_position_embeddings,
        "attention_bias": heads.bias,
        "mlp_bias": model.mlp.bias,
        "tie_word_embeddings": model.tie_word_embeddings,
        "rope_theta": model.rope.theta,
    }
    fields |= _optional("rope_scaling", dict(model.rope.scaling))
    fields |= _optional("eos_token_id", list(model.eos_token_ids))
    if windows:
        kinds = ["full_attention" if window is None else "sliding_attention" for window in model.sliding_windows]
        fields |= {"sliding_window": windows.pop(), "layer_types": kinds}
    return fields


def _optional(name: str, value: Mapping[str, Any] | list[Any]) -> dict[str, Any]:
    return {name: value} if value else {}
