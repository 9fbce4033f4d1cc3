"""Layers of experts at the row counts of decoding: router, choice, and the products of the experts that rows chose."""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch.nn.functional import linear, silu

from specsim.bench.clock import copies_of
from specsim.bench.contest import Contender, contest, roofline_target
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.row import OURS, BenchRow, Check, all_of, equal, within
from specsim.core.target import Experts
from specsim.models.shapes import shape

MODELS = ("gpt-oss-20b", "qwen3-30b-a3b")
ROWS = (1, 16)
MOST_RATIO = 1.5
_COPIES = 4  # layers of random weights; together they exceed the L2 cache many times over

Weights = Mapping[str, torch.Tensor]


def expert_rows(peaks: Peaks) -> Iterator[BenchRow]:
    """Time the expert layers of published models, each after a check against the chosen experts in float64."""
    for name in MODELS:
        config = shape(name).config
        experts = config.layers[-1].mlp
        if not isinstance(experts, Experts):
            raise TypeError(f"the last layer of {name} has no experts")
        size = 2 * experts.num_experts * 3 * experts.size * config.hidden_size
        layers = [_random(config.hidden_size, experts) for _ in range(min(_COPIES, copies_of(size)))]
        for rows in ROWS:
            yield _row(name, config.hidden_size, experts, layers, rows, peaks)
        del layers
        torch.cuda.empty_cache()


def _random(hidden_size: int, experts: Experts) -> dict[str, torch.Tensor]:
    """Make a layer's norm, router and experts."""
    count, size = experts.num_experts, experts.size
    shapes = {"experts.gate_up_proj": (count, 2 * size, hidden_size), "experts.down_proj": (count, hidden_size, size)}
    tensors = {f"{name}.weight": _normal(*size_of) for name, size_of in shapes.items()}
    if experts.bias:
        tensors |= {f"{name}.bias": _normal(*size_of[:2]) for name, size_of in shapes.items()}
    if experts.router_bias:
        tensors["router.bias"] = _normal(count).float()
    return tensors | {"router.weight": _normal(count, hidden_size).float()}


def _normal(*size: int) -> torch.Tensor:
    return torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(0, 0.02)


def _row(
    name: str, hidden_size: int, experts: Experts, layers: list[dict[str, torch.Tensor]], rows: int, peaks: Peaks
) -> BenchRow:
    from specsim.fast.layers import Weights as FastWeights
    from specsim.fast.model.rows import HiddenRows, Norm
    from specsim.fast.targets.experts import mixture_residual

    x = torch.randn(rows, hidden_size, device="cuda", dtype=torch.bfloat16)
    norm = Norm(torch.ones(hidden_size, device="cuda", dtype=torch.bfloat16), 1e-5)
    weights = [FastWeights(layer) for layer in layers]

    def run(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, chosen = mixture_residual(HiddenRows(x, norm), weights[index], experts)
        return out.values, chosen

    normed = HiddenRows(x, norm).normed()
    chosen = [run(index)[1].long() for index in range(len(layers))]
    touched = sum(len(indices.unique()) for indices in chosen) / len(layers)
    bound = experts_bound(rows, hidden_size, experts, touched)
    check = check_experts(x, normed, layers[0], experts)
    setting = {"model": name, "rows": rows, "experts read": round(touched, 2)}
    us = Contender(OURS, run, check)
    return contest("expert layer", setting, (us,), bound, peaks, len(layers), roofline_target(MOST_RATIO))


def experts_bound(rows: int, hidden_size: int, experts: Experts, touched: float) -> RooflineBound:
    """Bound a layer by its rows, its router and the chosen experts, each read once in bf16."""
    one = 3 * experts.size * hidden_size
    parts = (
        TensorBytes("router", 2 * experts.num_experts * hidden_size),
        TensorBytes("chosen experts", round(2 * one * touched)),
        TensorBytes("rows, read and written", 4 * rows * hidden_size),
    )
    return RooflineBound(parts, 2 * rows * (experts.top_k * one + experts.num_experts * hidden_size))


def check_experts(
    x: torch.Tensor, normed: torch.Tensor, layer: Weights, experts: Experts
) -> Callable[[tuple[torch.Tensor, torch.Tensor]], Check]:
    """Make a check of a layer's output: the experts with the highest logits, and their weighted sum in float64.

    The budget is that of plain torch in bf16, whose roundings are as many.
    """
    logits = linear(normed.double(), layer["router.weight"].double(), _bias(layer, "router.bias", torch.float64))
    best = logits.sort(descending=True, stable=True)
    chosen = best.indices[:, : experts.top_k]
    if experts.routing == "softmax":
        share = logits.softmax(-1).gather(1, chosen)
        share = share / share.sum(-1, keepdim=True) if experts.normalise else share
    else:
        share = best.values[:, : experts.top_k].softmax(-1)
    exact, plain = (_mixture(normed, layer, experts, chosen, share, dtype) for dtype in (torch.float64, torch.bfloat16))
    exact = x.double() + exact
    budget = 3 * float((x.double() + plain.double() - exact).abs().max()) + 2**-8 * exact.abs()

    def check(output: tuple[torch.Tensor, torch.Tensor]) -> Check:
        return all_of(
            "chosen experts, and rows against float64",
            equal("chosen experts", {"experts": output[1].long()}, {"experts": chosen}),
            within("rows against float64", output[0], exact, budget),
        )

    return check


def _bias(layer: Weights, name: str, dtype: torch.dtype) -> torch.Tensor | None:
    return layer[name].to(dtype) if name in layer else None


def _mixture(
    normed: torch.Tensor,
    layer: Weights,
    experts: Experts,
    chosen: torch.Tensor,
    share: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Add the outputs of each row's experts, one expert at a time."""
    out = torch.zeros(normed.shape, device=normed.device, dtype=dtype)
    for expert in chosen.unique().tolist():
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        names = [f"experts.{part}_proj" for part in ("gate_up", "down")]
        up, down = (layer[f"{name}.weight"][expert].to(dtype) for name in names)
        biases = [_bias(layer, f"{name}.bias", dtype) for name in names]
        up_bias, down_bias = (None if bias is None else bias[expert] for bias in biases)
        gate, up = linear(normed[rows].to(dtype), up, up_bias).chunk(2, dim=-1)
        if experts.activation == "clamped":
            gate = gate.clamp(max=7)
            hidden = (up.clamp(-7, 7) + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            hidden = silu(gate) * up
        out[rows] += share[rows, ranks, None].to(dtype) * linear(hidden, down, down_bias)
    return out
