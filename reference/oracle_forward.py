"""Dense forwards of the oracle over a whole sequence, without a cache, after Hugging Face's llama, mistral and qwen3.

EAGLE: arXiv 2401.15077 and 2406.16858; EAGLE-3: arXiv 2503.01840. Rows have positions 0..R-1 and attend causally. A
config is a specsim.core.target.ModelConfig, for EAGLE-3 a specsim.core.drafter.DrafterConfig. Dimensions: R rows · H
hidden · F target features · V vocabulary · A attention heads · D head dim.
"""

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from specsim.core.errors import InputError

Tensors = Mapping[str, torch.Tensor]


def in_dtype(model: Any, dtype: torch.dtype) -> SimpleNamespace:
    """Copy a checkpoint to the CPU, with its floating tensors in dtype."""
    tensors = {name: x.detach().cpu() for name, x in model.tensors.items()}
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    return SimpleNamespace(config=model.config, tensors=tensors)


def target_forward(
    config: Any, tensors: Tensors, token_ids: list[int], feature_layers: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the target: (logits [R, V], features [R, F]).

    Features are the hidden states entering feature_layers, or what the head reads if there are none.
    """
    hidden_RH = tensors["model.embed_tokens.weight"][token_ids]
    entering = []
    for layer in range(config.num_layers):
        entering.append(hidden_RH)
        name = f"model.layers.{layer}"
        normed_RH = _norm(config, tensors, f"{name}.input_layernorm", hidden_RH)
        hidden_RH = _layer(config, tensors, name, hidden_RH, normed_RH, config.window(layer))
    last_RH = _norm(config, tensors, "model.norm", hidden_RH)
    features_RF = torch.cat([entering[layer] for layer in feature_layers], dim=-1) if feature_layers else last_RH
    return last_RH @ tensors["lm_head.weight"].T, features_RF


def draft_forward(
    pair: Any, token_ids: list[int], features_MF: torch.Tensor, hiddens: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the drafter over rows (token, hidden): the last row's (hidden [H], draft logits [V]).

    The hidden states of the first M rows are the target's features, fused; the rows after them have the given ones.
    """
    config = pair.drafter.config
    tensors = pair.drafter.tensors
    if config.kind not in ("eagle", "eagle3", "mtp"):
        raise InputError("kind", config.kind, "eagle, eagle3 or mtp")
    embedding = tensors.get("embed_tokens.weight", pair.target.tensors["model.embed_tokens.weight"])[token_ids]
    fused_MH = _fused(config, tensors, features_MF) if config.kind == "eagle3" else features_MF
    hidden_RH = torch.cat([fused_MH, *(hidden[None] for hidden in hiddens)])
    if config.kind == "mtp":  # its only module
        hidden = mtp_forward(pair, 0, token_ids, hidden_RH)[-1]
        return hidden, pair.target.tensors["lm_head.weight"] @ hidden
    if config.kind == "eagle":
        hidden = _eagle(config.model, tensors, embedding, hidden_RH)[-1]
        return hidden, pair.target.tensors["lm_head.weight"] @ hidden
    hidden = _eagle3(config, tensors, embedding, hidden_RH)[-1]
    normed = _norm(config.model, tensors, "norm", hidden)
    return normed if config.norm_output else hidden, tensors["lm_head.weight"] @ normed


def mtp_forward(pair: Any, module: int, token_ids: list[int], hidden_RH: torch.Tensor) -> torch.Tensor:
    """Run a module of multi-token prediction over rows (token, hidden): hidden states after its norm, [R, H].

    DeepSeek-V3, arXiv 2412.19437, section 2.2, with a Llama layer.
    """
    config = pair.drafter.config.model
    tensors = pair.drafter.tensors
    name = f"modules.{module}"
    embedding_RH = _norm(config, tensors, f"{name}.enorm", pair.target.tensors["model.embed_tokens.weight"][token_ids])
    both = torch.cat([embedding_RH, _norm(config, tensors, f"{name}.hnorm", hidden_RH)], dim=-1)
    hidden_RH = _linear(tensors, f"{name}.eh_proj", both)
    normed_RH = _norm(config, tensors, f"{name}.input_layernorm", hidden_RH)
    hidden_RH = _layer(config, tensors, name, hidden_RH, normed_RH, config.window(module))
    return _norm(config, tensors, f"{name}.norm", hidden_RH)


def _fused(config: Any, tensors: Tensors, features_MF: torch.Tensor) -> torch.Tensor:
    """Project an EAGLE-3 head's features, after the norms that EAGLE-3.1 puts there (arXiv 2605.09992)."""
    if config.norm_before_fc:
        features_MF = _norm(config.model, tensors, "input_norm", features_MF)
    if config.fc_norm:
        features = features_MF.unflatten(-1, (-1, config.target_hidden_size)).unbind(1)
        features = [_norm(config.model, tensors, f"fc_norm.{place}", each) for place, each in enumerate(features)]
        features_MF = torch.cat(features, dim=-1)
    return _linear(tensors, "fc", features_MF)


def _eagle(config: Any, tensors: Tensors, embedding_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
    hidden_RH = _linear(tensors, "fc", torch.cat([embedding_RH, hidden_RH], dim=-1))
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        normed_RH = _norm(config, tensors, f"{name}.input_layernorm", hidden_RH) if layer else hidden_RH
        hidden_RH = _layer(config, tensors, name, hidden_RH, normed_RH, config.window(layer))
    return hidden_RH


def _eagle3(config: Any, tensors: Tensors, embedding_RH: torch.Tensor, hidden_RH: torch.Tensor) -> torch.Tensor:
    embedding_RH = _norm(config.model, tensors, "midlayer.input_layernorm", embedding_RH)
    normed_RH = _norm(config.model, tensors, "midlayer.hidden_norm", hidden_RH)
    residual_RH = normed_RH if config.norm_before_residual else hidden_RH
    both = torch.cat([embedding_RH, normed_RH], dim=-1)
    return _layer(config.model, tensors, "midlayer", residual_RH, both, config.model.window(0))


def _layer(
    config: Any, tensors: Tensors, name: str, residual_RH: torch.Tensor, normed: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Run a decoder layer after its first norm: attention reads `normed`, and its output is added to the residual."""
    hidden_RH = residual_RH + _attention(config, tensors, f"{name}.self_attn", normed, window)
    return feed_forward(config, tensors, name, hidden_RH)


def feed_forward(config: Any, tensors: Tensors, name: str, hidden_RH: torch.Tensor) -> torch.Tensor:
    """Run a decoder layer's second norm and MLP, and add the residual."""
    normed_RH = _norm(config, tensors, f"{name}.post_attention_layernorm", hidden_RH)
    gate, up = (_linear(tensors, f"{name}.mlp.{part}_proj", normed_RH) for part in ("gate", "up"))
    return hidden_RH + _linear(tensors, f"{name}.mlp.down_proj", F.silu(gate) * up)


def _attention(config: Any, tensors: Tensors, name: str, rows: torch.Tensor, window: int | None) -> torch.Tensor:
    """Compute causal attention of the rows, over the last `window` rows if there is a window."""
    query, key, value = (project_heads(config, tensors, name, part, rows) for part in "qkv")
    key, value = (x.repeat_interleave(config.num_heads // config.num_kv_heads, dim=0) for x in (key, value))
    age_RR = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
    unseen_RR = (age_RR < 0) | (age_RR >= (window or len(rows)))
    scores_ARR = (query @ key.mT * config.head_dim**-0.5).masked_fill(unseen_RR, -math.inf)
    return _linear(tensors, f"{name}.o_proj", (scores_ARR.softmax(-1) @ value).transpose(0, 1).flatten(1))


def _rotate(config: Any, x_ARD: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Apply rotary embedding to pairs (i, i + D/2), from position `first` on, with angles in float32."""
    angle = torch.arange(first, first + x_ARD.shape[1], dtype=torch.float32)[:, None] * _frequencies(config)
    cos, sin = (torch.cat([x, x], dim=-1).to(x_ARD.dtype) for x in (angle.cos(), angle.sin()))
    low, high = x_ARD.chunk(2, dim=-1)
    return x_ARD * cos + torch.cat([-high, low], dim=-1) * sin


def _frequencies(config: Any) -> torch.Tensor:
    """Angles of one position, f32 [D/2].

    Rope type llama3 slows waves that are long against the original context.
    """
    frequency = 1.0 / config.rope.theta ** (torch.arange(0, config.rope.size, 2).float() / config.rope.size)
    scaling = config.rope.scaling
    rope_type = scaling.get("rope_type", "default")
    if rope_type == "default":
        return frequency
    if rope_type != "llama3":
        raise InputError("rope_type", rope_type, "default or llama3")
    factor, low, high = (scaling[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequency
    smooth = (context / wavelength - low) / (high - low)
    blend = (1 - smooth) * frequency / factor + smooth * frequency
    slow = torch.where(wavelength > context / low, frequency / factor, blend)
    return torch.where(wavelength < context / high, frequency, slow)


def _norm(config: Any, tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.rms_norm_eps)
    return tensors[f"{name}.weight"] * wide.to(x.dtype)


def project_heads(
    config: Any, tensors: Tensors, name: str, part: str, rows_RH: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """Compute the queries, keys or values (part q, k, v) of rows at positions first, first + 1, ..., [A, R, D]."""
    heads = _linear(tensors, f"{name}.{part}_proj", rows_RH).unflatten(-1, (-1, config.head_dim)).transpose(0, 1)
    if part == "v":
        return heads
    if f"{name}.{part}_norm.weight" in tensors:  # Qwen3, over each head
        heads = _norm(config, tensors, f"{name}.{part}_norm", heads)
    return _rotate(config, heads, first)


def rms_norm(config: Any, tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """Compute a named RMS norm (Zhang & Sennrich 2019)."""
    return _norm(config, tensors, name, x)


def project(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    """Compute x Wᵀ (+ bias) with a named projection."""
    return _linear(tensors, name, x)


def _linear(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))
