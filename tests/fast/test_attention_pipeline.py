"""Attention in a pipeline of warps compiles for a Hopper GPU without one, and on one is near float64."""

import itertools
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from specsim.bench.random_trees import random_parents, tree_input
from specsim.core.children import python_path
from specsim.core.config import SamplingParams
from specsim.core.phases import Batch, VerifyInput
from specsim.core.pool import KVBuffer, KVLayout, KVPool
from specsim.fast.attention import Scores, attention
from specsim.fast.model.attention_plan import make_plan
from specsim.fast.model.metadata import tree_metadata
from specsim.fast.runtime.launch import has_warp_roles

COMPILE = """
import torch
from compile_kernels import compile_only

found = []
with compile_only(90, found.append):
    from specsim.core.pool import KVBuffer, KVLayout
    from specsim.fast.attention import attention
    from specsim.fast.model.metadata import AttentionMetadata

    def zeros(*shape, dtype=torch.int32):
        return torch.zeros(shape, dtype=dtype)

    long = torch.int64
    seen = zeros(128, 2)
    for dim, dtype in ((128, torch.bfloat16), (64, torch.float16)):
        metadata = AttentionMetadata(
            zeros(128, dtype=long), zeros(128, dtype=long), zeros(3, dtype=long), 64, True, zeros(2, 1024, dtype=long),
            zeros(2, dtype=long), zeros(128), zeros(2), False, zeros(2), zeros(2, 64), zeros(2, 64), seen, True,
        )
        kv = KVBuffer(KVLayout(1, 8, dim), 1024, dtype, "cpu")
        for splits in (1, 4):
            attention(zeros(128, 32, dim, dtype=dtype), 0, kv, metadata, None, splits=splits)
for each in found:
    print(each.name, each.stack_bytes, each.shared_bytes)
"""
on_hopper = pytest.mark.skipif(not has_warp_roles(), reason="needs a GPU of compute capability 9")


@dataclass(frozen=True)
class Case:
    """Trees over prefixes of these lengths."""

    lengths: list[int]
    nodes: int = 64
    page_size: int = 16
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Made:
    """Tensors of a case: requests, a padded one, and a pool with NaN in every slot that no row sees."""

    batch: Batch
    verify_input: VerifyInput
    pools: KVPool
    query: torch.Tensor  # NaN in rows of padding


def make(case: Case, device: str) -> Made:
    """Make a case; some nodes of the last request have no slot."""
    generator = torch.Generator().manual_seed(len(case.lengths) * case.nodes)
    requests, nodes = len(case.lengths), case.nodes
    columns = max(case.lengths) + nodes
    columns += -columns % case.page_size
    kv = KVBuffer(KVLayout(2, case.kv_heads, case.head_dim), (requests + 1) * columns, case.dtype, device)
    kv.keys.fill_(math.nan)
    kv.values.fill_(math.nan)
    pools = KVPool(kv, None, case.page_size, requests + 1, columns)
    pages = torch.randperm((requests + 1) * columns // case.page_size, generator=generator)
    slots = (pages[:, None] * case.page_size + torch.arange(case.page_size)).view(requests + 1, columns)
    pools.req_to_token.copy_(slots)
    lengths = torch.tensor([*case.lengths, 0])
    own = torch.stack([row[length : length + nodes] for row, length in zip(slots, lengths.tolist(), strict=True)])
    dropped = torch.zeros(requests + 1, nodes, dtype=torch.bool)
    dropped[requests - 1, [3, nodes - 1]] = True
    dropped[requests] = True
    own = torch.where(dropped, -1, own)
    parents = random_parents(requests + 1, nodes, nodes, generator)
    tree = tree_input(parents, lengths, torch.zeros(requests + 1, nodes), own)
    tree = replace(tree, mask=tree.mask & ~dropped[:, None, :])
    rows = [*range(requests), -1]
    batch = Batch.of([0] * len(rows), rows, lengths.tolist(), [SamplingParams()] * len(rows), 1)
    for request, length in enumerate(case.lengths):
        seen = torch.cat([slots[request, :length], own[request, own[request] >= 0]])
        for buffer in (kv.keys, kv.values):
            buffer[1, seen.to(device)] = torch.randn(len(seen), case.kv_heads, case.head_dim, device=device).to(
                case.dtype
            )
    query = torch.randn((requests + 1) * nodes, case.kv_heads * case.group, case.head_dim, device=device).to(case.dtype)
    query[requests * nodes :] = math.nan
    return Made(batch.to(device), tree.to(device), pools, query)


def attend(made: Made, **options) -> torch.Tensor:
    metadata = tree_metadata(made.batch, made.verify_input, made.pools)
    return attention(made.query, 1, made.pools.target, metadata, None, **options)


def assert_attended(case: Case, made: Made, out: torch.Tensor) -> None:
    """Check the error against four times that of weights and a result that are rounded to the queries' type."""
    nodes, heads = case.nodes, case.kv_heads * case.group
    own = made.verify_input.cache_locations.view(-1, nodes)
    for request, length in enumerate(case.lengths):
        rows = slice(request * nodes, (request + 1) * nodes)
        live = own[request] >= 0
        slots = torch.cat([made.pools.req_to_token[request, :length].to(out.device), own[request, live]])
        kv = made.pools.target
        keys, values = (part[1, slots].double().repeat_interleave(case.group, dim=1) for part in (kv.keys, kv.values))
        logits = torch.einsum("rad,cad->arc", made.query[rows].double(), keys) * case.head_dim**-0.5
        mask = torch.cat([live.new_ones(nodes, length), made.verify_input.mask[request][:, live]], dim=1)
        weights = logits.masked_fill(~mask, -math.inf).softmax(-1)
        exact = torch.einsum("arc,cad->rad", weights, values)
        rounded = torch.einsum("arc,cad->rad", weights.to(case.dtype).double(), values).to(case.dtype).double()
        assert out[rows].shape == (nodes, heads, case.head_dim)
        budget = 4 * (rounded - exact)[live].abs().max()
        error = (out[rows].double() - exact)[live].abs().max()
        assert error <= budget, (request, float(error), float(budget))
        assert (out[rows][~live] == 0).all()
    assert (out[len(case.lengths) * nodes :] == 0).all()


def is_pipelined(case: Case, made: Made, is_plain: bool = True) -> bool:
    metadata = tree_metadata(made.batch, made.verify_input, made.pools)
    keys = made.pools.target.keys[1]
    return make_plan(made.query, keys, case.head_dim, metadata, None, False, is_plain).is_pipelined


CASES = {
    "prefixes of all kinds": Case([1000, 0, 255, 128, 127, 3000, 1]),
    "pages of 1": Case([700, 64], page_size=1),
    "one long prefix": Case([20000], kv_heads=8),
    "a tile that is half empty": Case([300, 70], nodes=33, head_dim=64, dtype=torch.float16),
    "groups of 3": Case([5000, 90], nodes=40, group=3),
    "more words of visibility": Case([77, 1], nodes=100, group=2),
    "no prefix": Case([0, 0], nodes=64),
}


@pytest.mark.whole
def test_the_kernel_fits_into_a_multiprocessor(tmp_path):
    """Nothing is kept in local memory."""
    env = {**os.environ, **python_path(), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    lines = [line.split() for line in run.stdout.splitlines()]
    mine = [(int(stack), int(shared)) for name, stack, shared in lines if name == "_pipelined_kernel"]
    assert len(mine) == 4
    assert all(stack <= 64 and shared <= 232_448 for stack, shared in mine)


@on_hopper
@pytest.mark.parametrize("splits", [None, 1, 3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_pipeline_attends_within_the_budget(case, splits):
    """Slots that no row sees hold NaN, as do queries of padding; the bits are the same every time."""
    made = make(case, "cuda")
    assert is_pipelined(case, made)
    out = attend(made, splits=splits)
    assert_attended(case, made, out)
    assert torch.equal(out, attend(made, splits=splits))


@on_hopper
def test_an_invariant_pipeline_gives_equal_bits_solo_and_batched():
    case = Case([1500, 0, 4000, 33])
    made = make(case, "cuda")
    out = attend(made, invariant=True)
    assert_attended(case, made, out)
    for request in range(len(case.lengths)):
        rows = slice(request * case.nodes, (request + 1) * case.nodes)
        one = slice(request, request + 1)
        tree = made.verify_input
        solo = replace(
            made,
            batch=Batch.of([0], [request], [case.lengths[request]], [SamplingParams()], 1).to("cuda"),
            verify_input=replace(
                tree,
                draft_tokens=tree.draft_tokens[one],
                mask=tree.mask[one],
                positions=tree.positions[rows],
                cache_locations=tree.cache_locations[rows],
            ),
            query=made.query[rows],
        )
        assert torch.equal(attend(solo, invariant=True), out[rows])


@on_hopper
def test_other_attention_runs_outside_the_pipeline():
    """Few pairs, windows, wide types and heads of other sizes do."""
    for case in (Case([50], nodes=16), Case([50], dtype=torch.float32), Case([50], head_dim=80)):
        assert not is_pipelined(case, make(case, "cuda"))
    case = Case([300])
    made = make(case, "cuda")
    metadata = tree_metadata(made.batch, made.verify_input, made.pools)
    windowed = attention(made.query, 1, made.pools.target, metadata, Scores(window=1000))
    assert_attended(case, made, windowed)
    assert not is_pipelined(case, made, is_plain=False)


@pytest.mark.parametrize("dim", [64, 128])
def test_lanes_copy_every_entry_of_a_tile_once(dim):
    """A lane has 8 neighbours at a time, lanes fill rows in order, and a warp has 32 consecutive rows."""
    from specsim.fast.model.attention_pipeline import BLOCK_C, copy_layout

    layout = copy_layout(dim)
    parts = (layout.reg_bases, layout.lane_bases, layout.warp_bases)
    assert [len(bases) for bases in parts[1:]] == [5, 2]
    bases = [base for part in parts for base in part]
    places = set()
    for chosen in itertools.product((0, 1), repeat=len(bases)):
        own = [base for base, bit in zip(bases, chosen, strict=True) if bit]
        places.add((sum(row for row, _ in own), sum(column for _, column in own)))
    assert places == set(itertools.product(range(BLOCK_C.value), range(dim)))
    assert layout.reg_bases[:3] == [[0, 1], [0, 2], [0, 4]]
    assert layout.lane_bases[0] == [0, 8]
    assert layout.warp_bases == [[32, 0], [64, 0]]
