"""Decoder layers of the oracle over a whole sequence, without a cache: attention, dense MLPs and experts.

Rows have positions 0..R-1 and attend causally. A config is a specsim.core.target.ModelConfig. Dimensions: R rows ·
H hidden · A attention heads · D head dim.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from specsim.core.target import DenseMLP, LatentAttention
from specsim.reference.oracle_parts import Tensors, linear, norm, rotate, stored


def layer(
    config: Any, index: int, tensors: Tensors, name: str, residual_RH: torch.Tensor, normed: torch.Tensor
) -> tuple[torch.Tensor, list[list[int]]]:
    """Run a layer after its first norm: attention reads `normed`, and its output is added to the residual.

    Returns the hidden states and the experts of each row, which are none in a dense layer.
    """
    shape = config.layers[index]
    attend = _latent if isinstance(shape.attention, LatentAttention) else _heads
    hidden_RH = residual_RH + attend(config, shape.attention, tensors, f"{name}.self_attn", normed)
    return feed_forward(config, index, tensors, name, hidden_RH)


def feed_forward(
    config: Any, index: int, tensors: Tensors, name: str, hidden_RH: torch.Tensor
) -> tuple[torch.Tensor, list[list[int]]]:
    """Run a layer's second norm and MLP, and add the residual: hidden states and the experts of each row."""
    mlp = config.layers[index].mlp
    normed_RH = norm(tensors, f"{name}.post_attention_layernorm", hidden_RH, config.rms_norm_eps)
    if isinstance(mlp, DenseMLP):
        return hidden_RH + _gated(tensors, f"{name}.mlp", normed_RH), []
    outputs = []
    routed = []
    for row_H in normed_RH:
        shares = _route(mlp, tensors, f"{name}.mlp.router", row_H)
        parts = [share * _expert(mlp, tensors, f"{name}.mlp.experts", expert, row_H) for expert, share in shares]
        shared = [_gated(tensors, f"{name}.mlp.shared_experts", row_H)] if mlp.shared_size is not None else []
        outputs.append(torch.stack(parts).sum(0).to(row_H.dtype) + sum(shared))
        routed.append([expert for expert, _ in shares])
    return hidden_RH + torch.stack(outputs), routed


def _gated(tensors: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = (linear(tensors, f"{name}.{part}_proj", x) for part in ("gate", "up"))
    return linear(tensors, f"{name}.down_proj", F.silu(gate) * up)


def _expert(mlp: Any, tensors: Tensors, name: str, expert: int, row_H: torch.Tensor) -> torch.Tensor:
    """Run one expert on one row."""
    weights = {key: tensors[f"{name}.{key}"][expert] for key in _keys(mlp)}
    gate, up = linear(weights, "gate_up_proj", row_H).chunk(2)
    if mlp.activation == "silu":
        return linear(weights, "down_proj", F.silu(gate) * up)
    gate = torch.minimum(gate, torch.tensor(7.0, dtype=gate.dtype))
    up = torch.clip(up, -7.0, 7.0)
    return linear(weights, "down_proj", (1 + up) * gate / (1 + torch.exp(-1.702 * gate)))


def _keys(mlp: Any) -> list[str]:
    kinds = ("weight", "bias") if mlp.bias else ("weight",)
    return [f"{part}_proj.{kind}" for part in ("gate_up", "down") for kind in kinds]


def _route(mlp: Any, tensors: Tensors, name: str, row_H: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """List the experts of a row with their weights, the best first."""
    wide = torch.promote_types(row_H.dtype, torch.float32)
    names = [key for key in ("weight", "bias") if f"{name}.{key}" in tensors]
    logits = linear({f"router.{key}": tensors[f"{name}.{key}"].to(wide) for key in names}, "router", row_H.to(wide))
    score = torch.sigmoid(logits) if mlp.routing == "grouped_sigmoid" else torch.softmax(logits, -1)
    order = score + tensors[f"{name}.correction_bias"] if mlp.routing == "grouped_sigmoid" else logits
    experts = sorted(range(mlp.num_experts), key=lambda expert: -float(order[expert]))
    if mlp.groups > 1:
        size = mlp.num_experts // mlp.groups
        best = [sum(sorted(order[start : start + size].tolist())[-2:]) for start in range(0, mlp.num_experts, size)]
        groups = sorted(range(mlp.groups), key=lambda group: -best[group])[: mlp.top_groups]
        experts = [expert for expert in experts if expert // size in groups]
    experts = experts[: mlp.top_k]
    total = score[experts].sum() if mlp.normalise or mlp.routing == "softmax_of_top" else 1.0
    return [(expert, score[expert] / total * mlp.scaling) for expert in experts]


def _heads(config: Any, shape: Any, tensors: Tensors, name: str, rows: torch.Tensor) -> torch.Tensor:
    """Compute causal attention of the rows, over the last `window` and the first ones if there is a window."""
    query, key, value = (project_heads(config, shape, tensors, name, part, rows) for part in "qkv")
    key, value = (x.repeat_interleave(shape.num_heads // shape.num_kv_heads, dim=0) for x in (key, value))
    attended_ARD = _attend(query, key, value, shape.head_dim**-0.5, shape, tensors.get(f"{name}.sinks"))
    return linear(tensors, f"{name}.o_proj", attended_ARD.transpose(0, 1).flatten(1))


def project_heads(
    config: Any, shape: Any, tensors: Tensors, name: str, part: str, rows_RH: torch.Tensor, first: int = 0
) -> torch.Tensor:
    """Compute the queries, keys or values (part q, k, v) of rows at positions first, first + 1, ..., [A, R, D]."""
    heads = linear(tensors, f"{name}.{part}_proj", rows_RH).unflatten(-1, (-1, shape.head_dim)).transpose(0, 1)
    if part == "v":
        return stored(tensors, "value", heads)
    if f"{name}.{part}_norm.weight" in tensors:  # Qwen3, over each head
        heads = norm(tensors, f"{name}.{part}_norm", heads, config.rms_norm_eps)
    turned = rotate(shape.rope, heads, first)
    return stored(tensors, "key", turned) if part == "k" else turned


def _latent(config: Any, shape: Any, tensors: Tensors, name: str, rows_RH: torch.Tensor) -> torch.Tensor:
    """Compute causal latent attention with the keys and values of every head (arXiv 2405.04434, equations 37 to 47)."""
    if shape.query_rank is None:
        query = linear(tensors, f"{name}.q_proj", rows_RH)
    else:
        latent = norm(tensors, f"{name}.q_a_layernorm", linear(tensors, f"{name}.q_a_proj", rows_RH), 1e-6)
        query = linear(tensors, f"{name}.q_b_proj", latent)
    query = query.unflatten(-1, (shape.num_heads, -1)).transpose(0, 1)
    query = torch.cat([query[..., : shape.nope_dim], rotate(shape.rope, query[..., shape.nope_dim :])], -1)
    joint = linear(tensors, f"{name}.kv_a_proj_with_mqa", rows_RH)
    latent = stored(tensors, "key", norm(tensors, f"{name}.kv_a_layernorm", joint[:, : shape.latent_rank], 1e-6))
    heads = linear(tensors, f"{name}.kv_b_proj", latent).unflatten(-1, (shape.num_heads, -1)).transpose(0, 1)
    turned = stored(tensors, "key", rotate(shape.rope, joint[None, :, shape.latent_rank :]))
    turned = turned.expand(shape.num_heads, -1, -1)
    key = torch.cat([heads[..., : shape.nope_dim], turned], -1)
    attended_ARD = _attend(query, key, heads[..., shape.nope_dim :], shape.scale, shape, None)
    return linear(tensors, f"{name}.o_proj", attended_ARD.transpose(0, 1).flatten(1))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    shape: Any,
    sinks_A: torch.Tensor | None,
) -> torch.Tensor:
    """Compute causal softmax attention of heads, [A, R, D]."""
    num_rows = query.shape[1]
    column_R = torch.arange(num_rows)
    age_RR = column_R[:, None] - column_R
    unseen_RR = (age_RR < 0) | ((age_RR >= (shape.window or num_rows)) & (column_R >= shape.first_columns))
    scores_ARR = (query @ key.mT * scale).masked_fill(unseen_RR, -math.inf)
    return attention_weights(scores_ARR, sinks_A) @ value


def attention_weights(scores_ARC: torch.Tensor, sinks_A: torch.Tensor | None) -> torch.Tensor:
    """Compute the softmax of scores, with one more term exp(sink) in each head's denominator."""
    if sinks_A is None:
        return scores_ARC.softmax(-1)
    total_AR = torch.logaddexp(scores_ARC.logsumexp(-1), sinks_A[:, None])
    return (scores_ARC - total_AR[..., None]).exp()
