"""Forwards of the oracle's target over a whole sequence, without a cache.

A config is a specsim.core.target.ModelConfig. Dimensions: R rows · H hidden · F target features · V vocabulary.
"""

from types import SimpleNamespace
from typing import Any

import torch

from specsim.core.kv_buffer import KVFormat
from specsim.reference.oracle_layer import layer
from specsim.reference.oracle_parts import Tensors, norm


def in_dtype(model: Any, dtype: torch.dtype, stored_as: KVFormat | None = None) -> SimpleNamespace:
    """Copy a checkpoint to the CPU in dtype, with the scales of its KV if that is in fp8."""
    tensors = {name: x.detach().cpu() for name, x in model.tensors.items()}
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    if stored_as is not None and stored_as.dtype == "fp8_e4m3":
        scales = {"key": stored_as.key_scale, "value": stored_as.value_scale}
        tensors |= {f"kv.{part}_scale": torch.tensor(scale, dtype=dtype) for part, scale in scales.items()}
    return SimpleNamespace(config=model.config, tensors=tensors)


def target_forward(
    config: Any, tensors: Tensors, token_ids: list[int], feature_layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the target: (logits [R, V], features [R, F]).

    Features are the hidden states entering feature_layers (after the last layer: entering the final norm), or what the
    head reads if there are none.
    """
    logits_RV, features_RF, _ = _target(config, tensors, token_ids, feature_layers)
    return logits_RV, features_RF


def routed_experts(config: Any, tensors: Tensors, token_ids: list[int]) -> torch.Tensor:
    """Run a target with experts and list those of every row, i16 [R, expert layers, K]."""
    _, _, routed = _target(config, tensors, token_ids, ())
    return torch.stack([torch.tensor(experts, dtype=torch.int16) for experts in routed], dim=1)


def _target(
    config: Any, tensors: Tensors, token_ids: list[int], feature_layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor, list[list[list[int]]]]:
    hidden_RH = tensors["model.embed_tokens.weight"][token_ids]
    entering = []
    routed = []
    for index in range(config.num_layers):
        entering.append(hidden_RH)
        name = f"model.layers.{index}"
        normed_RH = norm(tensors, f"{name}.input_layernorm", hidden_RH, config.rms_norm_eps)
        hidden_RH, experts = layer(config, index, tensors, name, hidden_RH, normed_RH)
        routed += [experts] if experts else []
    entering.append(hidden_RH)
    last_RH = norm(tensors, "model.norm", hidden_RH, config.rms_norm_eps)
    features_RF = torch.cat([entering[index] for index in feature_layers], dim=-1) if feature_layers else last_RH
    return last_RH @ tensors["lm_head.weight"].T, features_RF, routed
