"""Matrix products of a model's layers at the row counts of decoding and verification."""

from collections.abc import Callable, Iterator

import torch
from torch.nn.functional import linear as library_linear

from specsim.bench.clock import copies_of
from specsim.bench.contest import Contender, contest
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.row import OURS, BenchRow, Check, within
from specsim.core.target import ModelConfig

ROWS = (1, 8, 16, 64)
FEW_ROWS = (1, 64)


def shapes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """List (outputs, inputs) of the products of one forward, with projections of the same input as one."""
    queries = model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim
    return {
        "qkv": (queries + 2 * keys, model.hidden_size),
        "o": (model.hidden_size, queries),
        "gate-up": (2 * model.intermediate_size, model.hidden_size),
        "down": (model.hidden_size, model.intermediate_size),
        "lm_head": (model.vocab_size, model.hidden_size),
    }


def linear_rows(model: ModelConfig, peaks: Peaks, quick: bool) -> Iterator[BenchRow]:
    """Time every product and torch's; both have the same budget around float64."""
    from specsim.fast.model.linear import linear
    from specsim.fast.model.rows import HiddenRows

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear(HiddenRows(x), weight)

    for name, (outputs, inputs) in shapes(model).items():
        copies = copies_of(2 * outputs * inputs)
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
        for rows in FEW_ROWS if quick else ROWS:
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            check = check_product(x, weights[0])
            contenders = [
                Contender(who, lambda index, run=run, x=x, weights=weights: run(x, weights[index]), check)
                for who, run in ((OURS, ours), ("torch linear", library_linear))
            ]
            setting = {"rows": rows, "outputs": outputs, "inputs": inputs}
            yield contest(f"linear {name}", setting, contenders, product_bound(rows, outputs, inputs), peaks, copies)


def product_bound(rows: int, outputs: int, inputs: int) -> RooflineBound:
    """Bound a product by the weight, the rows and the results, bf16."""
    parts = (
        TensorBytes("weight", 2 * outputs * inputs),
        TensorBytes("rows", 2 * rows * inputs),
        TensorBytes("products", 2 * rows * outputs),
    )
    return RooflineBound(parts, 2 * rows * outputs * inputs)


def check_product(x: torch.Tensor, weight: torch.Tensor) -> Callable[[torch.Tensor], Check]:
    """Make a check of a bf16 product against float64.

    The budget is twice half a unit in the last place, of the entry and of the products' scale. The second term leaves
    room for a library that adds parts of a sum in bf16; one missing summand in a thousand exceeds it.
    """
    exact = torch.cat([x.double() @ part.double().T for part in weight.split(16384)], dim=1)
    budget = 2**-8 * (exact.abs() + exact.square().mean().sqrt())

    def check(product: torch.Tensor) -> Check:
        return within("products against float64", product, exact, budget)

    return check
