"""Forwards of the oracle over a whole sequence, without a cache, of targets and of drafters with layers.

EAGLE: arXiv 2401.15077 and 2406.16858; EAGLE-3: arXiv 2503.01840. A config is a specsim.core.target.ModelConfig, for
EAGLE-3 a specsim.core.drafter.DrafterConfig. Dimensions: R rows · H hidden · F target features · V vocabulary.
"""

from types import SimpleNamespace
from typing import Any

import torch

from specsim.core.errors import InputError
from specsim.core.kv_buffer import KVFormat
from specsim.reference.oracle_layer import layer
from specsim.reference.oracle_parts import Tensors, linear, norm


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

    Features are the hidden states entering feature_layers, or what the head reads if there are none.
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
    last_RH = norm(tensors, "model.norm", hidden_RH, config.rms_norm_eps)
    features_RF = torch.cat([entering[index] for index in feature_layers], dim=-1) if feature_layers else last_RH
    return last_RH @ tensors["lm_head.weight"].T, features_RF, routed


def draft_forward(
    pair: Any, token_ids: list[int], features_MF: torch.Tensor, hiddens: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the drafter over rows (token, hidden): the last row's (hidden [H], draft logits [V]).

    The hidden states of the first M rows are the target's features, fused; the rows after them have the given ones.
    """
    config = pair.drafter.config
    tensors = pair.drafter.tensors
    if config.kind not in ("eagle", "eagle3", "p-eagle", "mtp"):
        raise InputError("kind", config.kind, "eagle, eagle3, p-eagle or mtp")
    embedding = tensors.get("embed_tokens.weight", pair.target.tensors["model.embed_tokens.weight"])[token_ids]
    fused_MH = _fused(config, tensors, features_MF) if config.kind in ("eagle3", "p-eagle") else features_MF
    hidden_RH = torch.cat([fused_MH, *(hidden[None] for hidden in hiddens)])
    if config.kind == "mtp":  # its only module
        hidden = mtp_forward(pair, 0, token_ids, hidden_RH)[-1]
        return hidden, pair.target.tensors["lm_head.weight"] @ hidden
    if config.kind == "eagle":
        hidden = _eagle(config.model, tensors, embedding, hidden_RH)[-1]
        return hidden, pair.target.tensors["lm_head.weight"] @ hidden
    hidden = _eagle3(config, tensors, embedding, hidden_RH)[-1]
    normed = norm(tensors, "norm", hidden, config.model.rms_norm_eps)
    return normed if config.norm_output else hidden, tensors["lm_head.weight"] @ normed


def mtp_forward(pair: Any, module: int, token_ids: list[int], hidden_RH: torch.Tensor) -> torch.Tensor:
    """Run a module of multi-token prediction over rows (token, hidden): hidden states after its norm, [R, H].

    DeepSeek-V3, arXiv 2412.19437, section 2.2, with a layer of any kind.
    """
    config = pair.drafter.config.model
    tensors = pair.drafter.tensors
    name = f"modules.{module}"
    eps = config.rms_norm_eps
    embedding_RH = norm(tensors, f"{name}.enorm", pair.target.tensors["model.embed_tokens.weight"][token_ids], eps)
    both = torch.cat([embedding_RH, norm(tensors, f"{name}.hnorm", hidden_RH, eps)], dim=-1)
    hidden_RH = linear(tensors, f"{name}.eh_proj", both)
    normed_RH = norm(tensors, f"{name}.input_layernorm", hidden_RH, eps)
    hidden_RH, _ = layer(config, module, tensors, name, hidden_RH, normed_RH)
    return norm(tensors, f"{name}.norm", hidden_RH, eps)


def _fused(config: Any, tensors: Tensors, features_MF: torch.Tensor) -> torch.Tensor:
    """Project an EAGLE-3 head's features, after the norms that EAGLE-3.1 puts there (arXiv 2605.09992)."""
    eps = config.model.rms_norm_eps
    if config.norm_before_fc:
        features_MF = norm(tensors, "input_norm", features_MF, eps)
    if config.fc_norm:
        features = features_MF.unflatten(-1, (-1, config.target_hidden_size)).unbind(1)
        features = [norm(tensors, f"fc_norm.{place}", each, eps) for place, each in enumerate(features)]
        features_MF = torch.cat(features, dim=-1)
    return linear(tensors, "fc", features_MF)


def _eagle(config: Any, tensors: Tensors, embedding_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
    hidden_RH = linear(tensors, "fc", torch.cat([embedding_RH, hidden_RH], dim=-1))
    for index in range(config.num_layers):
        name = f"layers.{index}"
        normed_RH = norm(tensors, f"{name}.input_layernorm", hidden_RH, config.rms_norm_eps) if index else hidden_RH
        hidden_RH, _ = layer(config, index, tensors, name, hidden_RH, normed_RH)
    return hidden_RH


def _eagle3(config: Any, tensors: Tensors, embedding_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
    eps = config.model.rms_norm_eps
    embedding_RH = norm(tensors, "midlayer.input_layernorm", embedding_RH, eps)
    normed_RH = norm(tensors, "midlayer.hidden_norm", hidden_RH, eps)
    residual_RH = normed_RH if config.norm_before_residual else hidden_RH
    both = torch.cat([embedding_RH, normed_RH], dim=-1)
    hidden_RH, _ = layer(config.model, 0, tensors, "midlayer", residual_RH, both)
    for index in range(1, config.model.num_layers):  # of P-EAGLE
        normed_RH = norm(tensors, f"layers.{index}.input_layernorm", hidden_RH, eps)
        hidden_RH, _ = layer(config.model, index, tensors, f"layers.{index}", hidden_RH, normed_RH)
    return hidden_RH
