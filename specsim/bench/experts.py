"""Layers of experts at the row counts of decoding: router, choice, and the products of the experts that rows chose."""

from collections.abc import Callable, Iterator, Mapping

import torch

from specsim.bench.clock import copies_of
from specsim.bench.contest import Contender, contest, roofline_target
from specsim.bench.dense import Cast
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.row import OURS, BenchRow, Check, all_of, equal, within
from specsim.core.target import Experts
from specsim.models.shapes import shape

MODELS = ("gpt-oss-20b", "qwen3-30b-a3b")
ROWS = (1, 16)
MOST_RATIO = 1.5
_COPIES = 4  # layers of random weights; together they exceed the L2 cache many times over


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
    x: torch.Tensor, normed: torch.Tensor, layer: Mapping[str, torch.Tensor], experts: Experts
) -> Callable[[tuple[torch.Tensor, torch.Tensor]], Check]:
    """Make a check of a layer's output by the reference in float64.

    The budget is that of the reference in bf16, whose roundings are as many.
    """
    from specsim.reference.layers import Weights
    from specsim.reference.targets.experts import mixture

    added, chosen = mixture(normed.double(), Weights(Cast(layer, torch.float64)), experts)
    exact = x.double() + added
    rounded, _ = mixture(normed, Weights(layer), experts)
    budget = 3 * float((x.double() + rounded.double() - exact).abs().max()) + 2**-8 * exact.abs()

    def check(output: tuple[torch.Tensor, torch.Tensor]) -> Check:
        return all_of(
            "chosen experts, and rows against float64",
            equal("chosen experts", {"experts": output[1].long()}, {"experts": chosen}),
            within("rows against float64", output[0], exact, budget),
        )

    return check
