"""Experts: a router chooses a few gated MLPs for each row, and each chosen weight is read once."""

import torch

from specsim.core.target import Experts
from specsim.fast.layers import Weights
from specsim.fast.model.experts import ExpertWeights, block_size, expert_blocks, experts_residual
from specsim.fast.model.experts_of_row import routed_row_residual
from specsim.fast.model.linear import linear
from specsim.fast.model.rank_sums import sum_residual
from specsim.fast.model.routing import FEW_ROWS, normed_and_logits, route
from specsim.fast.model.rows import HiddenRows, Norm


def mixture_residual(
    rows: HiddenRows, weights: Weights, experts: Experts, norm: Norm | None = None, out: torch.Tensor | None = None
) -> tuple[HiddenRows, torch.Tensor]:
    """Compute x + Σ weight · expert(n) over the experts of each row, [R, H], and prepare the next norm.

    x are the rows, n the rows after their norm. Where ranks share the weights, each has some channels of every expert,
    and all choose the same experts. Returns the experts of each row too, i16 [R, k].
    """
    router = weights.under("router")
    weight, bias = router["weight"], router.get("bias")  # float32, as the router's arithmetic is
    few_rows = len(rows.values) <= FEW_ROWS and not weights.batch_invariant
    if few_rows:
        x, logits_RE = normed_and_logits(rows, weight, bias)
    else:
        x = rows.normed()
        logits_RE = linear(HiddenRows(x.to(weight.dtype)), weight, bias, weights.batch_invariant)
    ranks = weights.ranks
    if ranks is None:
        base = rows.values if experts.shared_size is None else _shared_residual(rows.values, x, weights)
        return _routed_residual(base, x, weights, experts, logits_RE, few_rows, norm, out)
    # The sum over ranks adds the rows.
    base = None if experts.shared_size is None else _shared(x, weights)
    part, chosen_RK = _routed_residual(base, x, weights, experts, logits_RE, few_rows)
    return sum_residual(ranks, rows.values, part.values, norm, out), chosen_RK


def _grown(x: torch.Tensor, shared: Weights) -> HiddenRows:
    return HiddenRows(shared.project_gated(HiddenRows(x), "gate_up_proj"))


def _shared_residual(base: torch.Tensor, x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Add the shared expert's output to rows, [R, H]."""
    shared = weights.under("shared_experts")
    return shared.project_residual(base, _grown(x, shared), "down_proj", None).values


def _shared(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Compute this rank's part of the shared expert's output, [R, H]."""
    shared = weights.under("shared_experts")
    return shared.project(_grown(x, shared), "down_proj")


def _routed_residual(
    base: torch.Tensor | None,
    x: torch.Tensor,
    weights: Weights,
    experts: Experts,
    logits_RE: torch.Tensor,
    few_rows: bool,
    norm: Norm | None = None,
    out: torch.Tensor | None = None,
) -> tuple[HiddenRows, torch.Tensor]:
    """Add the outputs of the chosen experts, or a rank's part of them, to the base."""
    parts = weights.under("experts")
    stacked = ExpertWeights(
        parts["gate_up_proj.weight"],
        parts["down_proj.weight"],
        parts.get("gate_up_proj.bias"),
        parts.get("down_proj.bias"),
    )
    choice_bias = weights.get("router.correction_bias")
    if few_rows and len(x) == 1:
        return routed_row_residual(base, x, stacked, experts, logits_RE, choice_bias, norm, out)
    routes = route(logits_RE, experts, choice_bias)
    num_pairs = 1 if weights.batch_invariant else routes.experts.numel()
    blocks = expert_blocks(routes.experts, experts.num_experts, block_size(num_pairs, experts.num_experts))
    return experts_residual(base, x, stacked, routes, blocks, experts.activation, norm, out), routes.experts
