"""Check that the candidates selected for a tree form one."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates
from specsim.fast.runtime.launch import block_of, kernel, require_contiguous
from specsim.fast.tree.nodes import parents_of

_ROWS = 32
_COLUMNS = 64


class MalformedTree(ValueError):
    """A parent list that is no tree, reported with request and node."""


@kernel
@no_type_check
def _malformed_kernel(
    chosen_ptr, parent_list_ptr, out_ptr, num_nodes, num_blocks, k, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Find the first node of one request that has no parent, unless a candidate is chosen twice."""
    request = tl.program_id(0).to(tl.int64)
    chosen_ptr += request * (num_nodes - 1)
    parent_list_ptr += request * num_blocks
    first = num_nodes
    twice = 0
    for start in range(1, num_nodes, ROWS):
        node = start + tl.arange(0, ROWS)[:, None]
        flat, _, rooted = parents_of(chosen_ptr, parent_list_ptr, node, num_nodes, num_blocks, k, COLUMNS)
        bad = tl.where((node < num_nodes) & (rooted == 0), node, num_nodes)
        first = tl.minimum(first, tl.min(tl.min(bad, axis=1), axis=0))
        for other_start in range(1, num_nodes, COLUMNS):
            other = other_start + tl.arange(0, COLUMNS)[None, :]
            other_flat = tl.load(chosen_ptr + other - 1, mask=other < num_nodes, other=0)
            same = (other_flat == flat) & (other < node) & (node < num_nodes)
            twice = tl.maximum(twice, tl.max(tl.max(same.to(tl.int32), axis=1), axis=0))
    verdict = tl.where(twice > 0, 1, tl.where(first < num_nodes, 1 + first, 0))
    tl.store(out_ptr + request, verdict.to(tl.int32))


def malformed(candidates: Candidates, top_scores_index: torch.Tensor, config: SpecConfig) -> torch.Tensor:
    """Find malformed trees, i32 [B]: 0 for a correct one, 1 if a candidate is selected twice.

    Else it is 1 + the first node without a parent before it.
    """
    require_contiguous(top_scores_index=top_scores_index, parent_list=candidates.parent_list)
    batch_size, num_drafts = top_scores_index.shape
    num_nodes = num_drafts + 1
    out = torch.empty(batch_size, dtype=torch.int32, device=top_scores_index.device)
    _malformed_kernel[(batch_size,)](
        chosen_ptr=top_scores_index,
        parent_list_ptr=candidates.parent_list,
        out_ptr=out,
        num_nodes=num_nodes,
        num_blocks=candidates.parent_list.shape[1],
        k=config.topk,
        ROWS=block_of(num_nodes, _ROWS, num_nodes),
        COLUMNS=block_of(num_nodes, _COLUMNS),
    )
    return out


def check(candidates: Candidates, top_scores_index: torch.Tensor, config: SpecConfig) -> None:
    """Raise MalformedTree for the first malformed request.

    The check waits for the device, so it cannot run in a graph.
    """
    for request, verdict in enumerate(malformed(candidates, top_scores_index, config).tolist()):
        if verdict:
            chosen = top_scores_index[request].tolist()
            parent_list = candidates.parent_list[request].tolist()
            raise MalformedTree(f"request {request}{_fault(chosen, parent_list, config.topk, verdict - 1)}")


def _fault(chosen: list[int], parent_list: list[int], k: int, node: int) -> str:
    if node == 0:
        return f": a candidate is selected twice in {chosen}"
    flat = chosen[node - 1]
    if not 0 <= flat < len(parent_list) * k:
        return f", node {node}: candidate {flat} is outside the pool of {len(parent_list) * k}"
    return f", node {node}: parent candidate {parent_list[flat // k]} is not selected before it"
