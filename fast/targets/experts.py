"""Experts: a router chooses a few gated MLPs for each row, and each chosen weight is read once."""

import torch

from specsim.core.layer_config import Experts
from specsim.fast.layers import Weights
from specsim.fast.model.expert_blocks import block_size, expert_blocks
from specsim.fast.model.experts import ExpertWeights, experts_onto
from specsim.fast.model.linear import linear
from specsim.fast.model.routing import route
from specsim.fast.model.rows import Norm, Rows


def mixture_onto(
    rows: Rows, weights: Weights, experts: Experts, norm: Norm | None = None, out: torch.Tensor | None = None
) -> tuple[Rows, torch.Tensor]:
    """Compute x + Σ weight · expert(n) over the experts of each row, [R, H], and prepare the next norm.

    x are the rows, n the rows after their norm. Returns the experts of each row too, i16 [R, k].
    """
    x = rows.applied()
    router = weights.under("router")
    weight = router["weight"]  # float32, as the router's arithmetic is
    logits_RE = linear(Rows(x.to(weight.dtype)), weight, router.get("bias"), weights.batch_invariant)
    routes = route(logits_RE, experts, router.get("correction_bias"))
    size = block_size(routes.experts.numel(), experts.num_experts)
    blocks = expert_blocks(routes.experts, experts.num_experts, size)
    parts = weights.under("experts")
    stacked = ExpertWeights(
        parts["gate_up_proj.weight"],
        parts["down_proj.weight"],
        parts.get("gate_up_proj.bias"),
        parts.get("down_proj.bias"),
    )
    base = rows.values
    if experts.shared_size is not None:
        shared = weights.under("shared_experts")
        base = shared.project_onto(base, Rows(shared.project_gated(Rows(x), "gate_up_proj")), "down_proj", None).values
    return experts_onto(base, x, stacked, routes, blocks, experts.activation, norm, out), routes.experts
