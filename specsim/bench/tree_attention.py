"""Attention of tree nodes over a long paged prefix, compared with SDPA on gathered KV and flex_attention."""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from specsim.bench.clock import copies_of
from specsim.bench.contest import Contender, contest
from specsim.bench.random_trees import random_parents, tree_input
from specsim.bench.roofline import Peaks, RooflineBound, TensorBytes
from specsim.bench.row import OURS, BenchRow, Check, PerformanceTarget, all_of, within
from specsim.core.config import SamplingParams
from specsim.core.phases import Batch, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool

HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128
GROUP = HEADS // KV_HEADS
COLUMNS = 32768  # of a request, its tree included
REQUESTS = (1, 4, 8)
NODES = (1, 8, 16, 32, 64)
PAGE_SIZES = (16, 64)
SDPA = "SDPA, explicit mask, gather counted"
FLEX = "flex_attention, KV contiguous already"
# Of the read bandwidth for few rows at one request and at more, of the dense rate for many.
SHARE_ALONE = 0.55
SHARE_TOGETHER = 0.75
SHARE_DENSE = 0.50
FEW_NODES = 16


Attend = Callable[[int], torch.Tensor]  # attention over the KV of a layer


@dataclass(frozen=True, slots=True)
class Trees:
    """Random trees over random KV, one layer per call; pages lie in a random order."""

    batch: Batch
    verify_input: VerifyInput
    pools: KVPool
    mask: torch.Tensor  # bool [B, N, N], visibility among the nodes
    slots: torch.Tensor  # i64 [B, C] of every column
    query: torch.Tensor  # bf16 [B·N, A, D]


def trees(requests: int, nodes: int, page_size: int, layers: int, columns: int, device: str = "cuda") -> Trees:
    """Make trees whose nodes have random earlier parents.

    Their values are large, so that a wrong mask shows among the many keys.
    """
    generator = torch.Generator().manual_seed(requests * 1000 + nodes)
    prefix = columns - nodes
    kv = KVBuffer(KVLayout(layers, KV_HEADS, HEAD_DIM), requests * columns, torch.bfloat16, device)
    kv.keys.normal_()
    kv.values.normal_()
    pools = KVPool(kv, None, page_size, requests, columns)
    pages = torch.randperm(requests * columns // page_size, generator=generator)
    slots = (pages[:, None] * page_size + torch.arange(page_size)).view(requests, columns).to(device)
    pools.req_to_token.copy_(slots)
    for layer in range(layers):
        kv.values[layer, slots[:, prefix:].flatten()] *= 64
    batch = Batch.of([0] * requests, list(range(requests)), [prefix] * requests, [SamplingParams()] * requests, 1)
    parents = random_parents(requests, nodes, nodes, generator)
    verify_input = tree_input(parents, batch.seq_lens, torch.zeros(requests, nodes), slots[:, prefix:].cpu()).to(device)
    mask = verify_input.mask
    query = torch.randn(requests * nodes, HEADS, HEAD_DIM, device=device, dtype=torch.bfloat16)
    return Trees(batch.to(device), verify_input, pools, mask, slots, query)


def attention_rows(peaks: Peaks, quick: bool) -> Iterator[BenchRow]:
    """Time every setting of requests, nodes and page sizes."""
    sizes = PAGE_SIZES[:1] if quick else PAGE_SIZES
    for requests in REQUESTS:
        for nodes in (1, 8, 64) if quick else NODES:
            for page_size in sizes:
                yield attention_row(requests, nodes, page_size, peaks)
                torch.cuda.empty_cache()


def attention_row(requests: int, nodes: int, page_size: int, peaks: Peaks) -> BenchRow:
    """Check and time all contenders in one setting."""
    bound = attention_bound(requests, nodes, COLUMNS)
    layers = copies_of(bound.bytes)
    case = trees(requests, nodes, page_size, layers, COLUMNS)
    check = check_attention(case)
    contenders = [Contender(OURS, ours(case), check), Contender(SDPA, sdpa(case), check)]
    if page_size == PAGE_SIZES[0]:  # it knows no pages
        contenders.append(Contender(FLEX, flex(case), check))
    setting = {"requests": requests, "nodes": nodes, "columns": COLUMNS, "page size": page_size}
    notes = ["flex_attention's block mask is made before the clock starts"] if page_size == PAGE_SIZES[0] else []
    set_targets = lambda times, bound, peaks: targets(requests, nodes, times, bound, peaks)  # noqa: E731
    name = f"tree attention, {'up to 16' if nodes <= FEW_NODES else '32 and 64'} nodes"
    return contest(name, setting, contenders, bound, peaks, layers, set_targets=set_targets, notes=notes)


def attention_bound(requests: int, nodes: int, columns: int) -> RooflineBound:
    """Bound attention by keys, values, queries and outputs, as if every node saw all columns."""
    kv = 2 * requests * columns * KV_HEADS * HEAD_DIM
    rows = 2 * requests * nodes * HEADS * HEAD_DIM
    parts = (
        TensorBytes("keys", kv),
        TensorBytes("values", kv),
        TensorBytes("queries", rows),
        TensorBytes("attended", rows),
    )
    return RooflineBound(parts, 4 * requests * nodes * columns * HEADS * HEAD_DIM)


def targets(
    requests: int, nodes: int, times: Mapping[str, float], bound: RooflineBound, peaks: Peaks
) -> list[PerformanceTarget]:
    """Set targets: a share of the device's peak, as time over the time at the peak, and the baselines' times."""
    if nodes <= FEW_NODES:
        share = SHARE_ALONE if requests == 1 else SHARE_TOGETHER
        speed_targets = [
            PerformanceTarget(
                f"time / bytes ({share:.0%} of read bandwidth)", times[OURS] / bound.read_us(peaks), 1 / share
            )
        ]
    else:
        ratio = times[OURS] / bound.compute_us(peaks)
        speed_targets = [
            PerformanceTarget(f"time / operations ({SHARE_DENSE:.0%} of the dense rate)", ratio, 1 / SHARE_DENSE)
        ]
    return speed_targets + [
        PerformanceTarget(f"time / {name}", times[OURS] / times[name], 1.0) for name in times if name != OURS
    ]


def ours(case: Trees) -> Attend:
    """Attend with the fast implementation's kernel over pages.

    Its metadata is made once per forward, not per layer, and is not timed.
    """
    from specsim.fast.attention import attention
    from specsim.fast.model.metadata import tree_metadata

    metadata = tree_metadata(case.batch, case.verify_input, case.pools)
    return lambda layer: attention(case.query, layer, case.pools.target, metadata, None)


def _rows_of_group(case: Trees) -> torch.Tensor:
    """Arrange the queries of a key head's group as rows of one head, [B, KV heads, N · group, D]."""
    requests, nodes = case.mask.shape[:2]
    query = case.query.view(requests, nodes, KV_HEADS, GROUP, HEAD_DIM)
    return query.permute(0, 2, 1, 3, 4).reshape(requests, KV_HEADS, nodes * GROUP, HEAD_DIM)


def _flat(attended: torch.Tensor, nodes: int) -> torch.Tensor:
    """Arrange [B, KV heads, N · group, D] as [B·N, A, D]."""
    requests = len(attended)
    parts = attended.view(requests, KV_HEADS, nodes, GROUP, HEAD_DIM).permute(0, 2, 1, 3, 4)
    return parts.reshape(requests * nodes, HEADS, HEAD_DIM)


def _gathered(case: Trees, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values of every column, [B, KV heads, C, D] each."""
    kv = case.pools.target
    keys, values = (part[layer][case.slots].transpose(1, 2) for part in (kv.keys, kv.values))
    return keys, values


def _seen(case: Trees) -> torch.Tensor:
    """Make bool [B, N, C]: every node sees the prefix, and the nodes that the mask allows."""
    requests, nodes = case.mask.shape[:2]
    prefix = torch.ones(requests, nodes, case.slots.shape[1] - nodes, dtype=torch.bool, device=case.mask.device)
    return torch.cat([prefix, case.mask], dim=2)


def sdpa(case: Trees) -> Attend:
    """Gather, then attend with an explicit mask; queries of a group are rows, so keys are not copied."""
    query = _rows_of_group(case)
    nodes = case.mask.shape[1]
    mask = _seen(case).repeat_interleave(GROUP, dim=1)[:, None]

    def run(layer: int) -> torch.Tensor:
        return _flat(scaled_dot_product_attention(query, *_gathered(case, layer), attn_mask=mask), nodes)

    return run


def flex(case: Trees) -> Attend:
    """Attend with compiled flex_attention over KV that is contiguous before the clock starts."""
    from torch.nn.attention.flex_attention import create_block_mask

    requests, nodes = case.mask.shape[:2]
    columns = case.slots.shape[1]
    prefix = columns - nodes
    mask = case.mask
    query = case.query.view(requests, nodes, HEADS, HEAD_DIM).transpose(1, 2).contiguous()

    def sees(request: Any, _head: Any, node: Any, column: Any) -> Any:
        return (column < prefix) | mask[request, node, (column - prefix).clamp(min=0)]

    @functools.cache  # what the first call makes is not counted
    def prepared() -> tuple[Callable[..., torch.Tensor], list[tuple[torch.Tensor, ...]]]:
        layers = range(len(case.pools.target.keys))
        kv = [tuple(part.contiguous() for part in _gathered(case, layer)) for layer in layers]
        block_mask = create_block_mask(sees, requests, None, nodes, columns, device="cuda")
        return _flex_of(query, kv[0], {"block_mask": block_mask, "enable_gqa": True}), kv

    def run(layer: int) -> torch.Tensor:
        attend, kv = prepared()
        return attend(kv[layer]).transpose(1, 2).reshape(requests * nodes, HEADS, HEAD_DIM)

    return run


def _flex_of(
    query: torch.Tensor, kv: tuple[torch.Tensor, ...], arguments: dict[str, Any]
) -> Callable[[tuple[torch.Tensor, ...]], torch.Tensor]:
    """Compile flex_attention for few queries, or where that fails with its main kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # a function that has been compiled for eight shapes is compiled for no more
    attend: Any = torch.compile(flex_attention, dynamic=False)
    few: dict[str, bool] = {}
    many = {"FORCE_USE_FLEX_ATTENTION": True}
    *first, last = (few, many) if query.shape[2] * GROUP <= 64 else (many,)
    for options in first:
        try:
            attend(query, *kv, kernel_options=options, **arguments)
        except Exception:  # of whatever kind its compiler raises
            continue
        return lambda kv: attend(query, *kv, kernel_options=options, **arguments)
    return lambda kv: attend(query, *kv, kernel_options=last, **arguments)


def check_attention(case: Trees) -> Callable[[torch.Tensor], Check]:
    """Make a check of the first and the last request of layer 0 against float64.

    The budget is four times the largest error of the same formula with weights and result rounded to bf16.
    """
    nodes = case.mask.shape[1]
    query = _rows_of_group(case)
    seen = _seen(case).repeat_interleave(GROUP, dim=1)
    keys, values = _gathered(case, 0)
    cases = []
    for request in sorted({0, len(case.mask) - 1}):
        weights = query[request].double() @ keys[request].double().mT * HEAD_DIM**-0.5
        weights = weights.masked_fill(~seen[request], -torch.inf).softmax(-1)
        exact = weights @ values[request].double()
        rounded = (weights.bfloat16() @ values[request]).double()
        budget = 4 * float((rounded - exact).abs().max())
        cases.append((request, _flat(exact[None], nodes), budget))

    def check(attended: torch.Tensor) -> Check:
        checks = [
            within(f"request {request}", attended[request * nodes : (request + 1) * nodes], exact, budget)
            for request, exact, budget in cases
        ]
        return all_of("all nodes and heads of the first and the last request against float64", *checks)

    return check
