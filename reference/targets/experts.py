"""Experts: a router chooses a few gated MLPs for each row (arXiv 1701.06538; DeepSeek-V3, arXiv 2412.19437)."""

import torch
from torch.nn.functional import linear, silu

from specsim.core.target import Experts
from specsim.reference.layers import Weights, gated_mlp

_LIMIT = 7.0  # of GPT-OSS's clamped activation
_ALPHA = 1.702


def highest(scores_RE: torch.Tensor, count: int) -> torch.Tensor:
    """List the `count` highest of each row in descending order, of equal ones the lower index first: i64 [R, count]."""
    return scores_RE.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route(x_RH: torch.Tensor, weights: Weights, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each row: (i64 [R, K], weights [R, K]), in float32 or wider.

    softmax: p = softmax(x Wᵀ), weights p of the highest. softmax_of_top: softmax over the highest logits.
    grouped_sigmoid: s = σ(x Wᵀ), chosen by s + correction bias in the groups whose two best sum highest, weights s.
    """
    wide = torch.promote_types(x_RH.dtype, torch.float32)
    bias = weights.get("bias")
    logits_RE = linear(x_RH.to(wide), weights["weight"].to(wide), None if bias is None else bias.to(wide))
    if experts.routing == "softmax_of_top":
        chosen = highest(logits_RE, experts.top_k)
        return chosen, logits_RE.gather(1, chosen).softmax(-1)
    if experts.routing == "softmax":
        score_RE = logits_RE.softmax(-1)
        chosen = highest(score_RE, experts.top_k)
    else:
        score_RE = logits_RE.sigmoid()
        chosen = highest(within_groups(score_RE + weights["correction_bias"].to(wide), experts), experts.top_k)
    share_RK = score_RE.gather(1, chosen)
    if experts.normalise:
        share_RK = share_RK / (share_RK.sum(-1, keepdim=True) + 1e-20)
    return chosen, share_RK * experts.scaling


def within_groups(score_RE: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Set scores outside the best groups to -inf; a group counts the sum of its two best."""
    score_RGM = score_RE.unflatten(-1, (experts.groups, -1))
    two = highest(score_RGM, min(2, score_RGM.shape[-1]))
    best_RG = highest(score_RGM.gather(-1, two).sum(-1), experts.top_groups)
    kept_RG = torch.zeros(score_RGM.shape[:2], dtype=torch.bool).scatter(1, best_RG, True)
    return score_RGM.masked_fill(~kept_RG[..., None], -torch.inf).flatten(1)


def activated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """Compute the gated activation of [gate | up]: silu(gate) · up, or GPT-OSS's clamped one."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return silu(gate) * up
    gate = gate.clamp(max=_LIMIT)
    return (up.clamp(-_LIMIT, _LIMIT) + 1) * gate * torch.sigmoid(_ALPHA * gate)


def mixture(x_RH: torch.Tensor, weights: Weights, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the weighted sum of each row's experts, and of the shared one: ([R, H], chosen experts i64 [R, K])."""
    chosen_RK, share_RK = route(x_RH, weights.under("router"), experts)
    projections = weights.under("experts")
    grow, shrink = projections["gate_up_proj.weight"], projections["down_proj.weight"]
    grow_bias, shrink_bias = projections.get("gate_up_proj.bias"), projections.get("down_proj.bias")
    out_RH = torch.zeros_like(x_RH, dtype=share_RK.dtype)
    for expert in chosen_RK.unique().tolist():
        rows, places = (chosen_RK == expert).nonzero(as_tuple=True)
        gate_up = linear(x_RH[rows], grow[expert], None if grow_bias is None else grow_bias[expert])
        hidden = activated(gate_up, experts.activation)
        output = linear(hidden, shrink[expert], None if shrink_bias is None else shrink_bias[expert])
        out_RH[rows] += share_RK[rows, places, None] * output
    out_RH = out_RH.to(x_RH.dtype)
    if experts.shared_size is not None:
        out_RH = out_RH + gated_mlp(x_RH, weights.under("shared_experts"))
    return out_RH, chosen_RK
