"""Nodes of a verify tree from explicit candidates, each of which has its parent."""

from typing import NamedTuple, Self, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.errors import InputError
from specsim.core.phases import ExplicitCandidates, VerifyInput
from specsim.fast.runtime.launch import await_input, kernel, next_power_of_2
from specsim.fast.tree.nodes import RootTables, TreeTables, selected, steps_of, store_nodes

MOST_EXPLICIT = 4096  # candidates of a request, which one program ranks


class ExplicitTables(NamedTuple):
    """Explicit candidates as kernel arguments."""

    tokens_ptr: torch.Tensor
    parents_ptr: torch.Tensor
    scores_ptr: torch.Tensor
    num_alive_ptr: torch.Tensor

    @classmethod
    def of(cls, candidates: ExplicitCandidates) -> Self:
        return cls(candidates.tokens, candidates.parents, candidates.scores, candidates.num_alive)


@kernel
@no_type_check
def _explicit_nodes_kernel(
    candidate_ptrs,
    root_ptrs,
    tree_ptrs,
    num_candidates,
    num_nodes,
    num_steps,
    LOG: tl.constexpr,
    SKIPS_EMPTY: tl.constexpr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select and write the nodes of one request, dead ones last; with SKIPS_EMPTY, of one that has candidates.

    A candidate counts the lowest score on its path. draft_tokens first holds the chosen candidates.
    """
    await_input(PDL)
    request = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    node = tl.arange(0, NODES)
    entry = request * num_nodes + node
    mask = node < num_nodes
    num_alive = tl.minimum(tl.load(candidate_ptrs.num_alive_ptr + request), num_candidates)
    writes = (num_alive > 0) | (not SKIPS_EMPTY)
    mask &= writes
    is_alive = index < num_alive
    candidates = request * num_candidates + index
    scores = tl.load(candidate_ptrs.scores_ptr + candidates, mask=is_alive, other=0.0)
    stored_parents = tl.load(candidate_ptrs.parents_ptr + candidates, mask=is_alive, other=-1).to(tl.int32)
    parents = tl.where((stored_parents >= 0) & (stored_parents < index), stored_parents, -1)
    all_tokens = tl.load(candidate_ptrs.tokens_ptr + candidates, mask=is_alive, other=0)
    path_scores = scores
    ancestor = parents
    depth = is_alive.to(tl.int32)
    for _ in range(num_steps):
        is_node = ancestor >= 0
        depth += is_node.to(tl.int32)
        above = tl.gather(scores, tl.maximum(ancestor, 0), 0)
        path_scores = tl.where(is_node, tl.minimum(path_scores, above), path_scores)
        ancestor = tl.where(is_node, tl.gather(parents, tl.maximum(ancestor, 0), 0), -1)
    is_alive = is_alive & (depth <= steps_of(root_ptrs, request, num_steps))
    count = tl.minimum(tl.sum(is_alive.to(tl.int32), axis=0), num_nodes - 1)
    is_selected, rank = selected(path_scores[None, :], is_alive[None, :], count)
    node_of = tl.reshape(tl.where(is_selected, 1 + rank, 0), [BLOCK])
    tl.store(tree_ptrs.proposed_depth_ptr + request, tl.max(tl.where(node_of > 0, depth, 0), axis=0), mask=writes)
    tl.store(tree_ptrs.draft_tokens_ptr + request * num_nodes + node_of, index.to(tl.int64), mask=node_of > 0)
    tl.debug_barrier()  # all are written before any is read, and read before tokens take their place
    is_draft = (node > 0) & (node <= count)
    flat = tl.load(tree_ptrs.draft_tokens_ptr + entry, mask=is_draft, other=0).to(tl.int32)
    tl.debug_barrier()
    wanted = tl.gather(parents, flat, 0)
    parent = tl.where(wanted >= 0, tl.gather(node_of, tl.maximum(wanted, 0), 0), 0)
    tokens = tl.where(is_draft, tl.gather(all_tokens, flat, 0), 0)
    node_scores = tl.where(is_draft, tl.gather(scores, flat, 0), 0.0)
    bonus = tl.load(root_ptrs.bonus_tokens_ptr + request).to(tl.int64)
    store_nodes(tree_ptrs, entry, node, bonus, tokens, tl.where(is_draft, parent, -1), node_scores, mask, LOG)


def write_explicit_nodes(
    tree: VerifyInput,
    candidates: ExplicitCandidates,
    roots: RootTables,
    config: SpecConfig,
    skips_empty: bool = False,
) -> None:
    """Write tokens, parents, scores and proposed depths of all nodes.

    skips_empty: the nodes of requests without candidates stay as they are.
    Raises InputError for more candidates than one program ranks.
    """
    batch_size, num_candidates = candidates.tokens.shape
    if num_candidates > MOST_EXPLICIT:
        raise InputError("candidates", num_candidates, f"at most {MOST_EXPLICIT} of a request with impl 'fast'")
    block = next_power_of_2(max(num_candidates, 1))
    _explicit_nodes_kernel[(batch_size,)](
        candidate_ptrs=ExplicitTables.of(candidates),
        root_ptrs=roots,
        tree_ptrs=TreeTables.of(tree),
        num_candidates=num_candidates,
        num_nodes=config.num_draft_tokens,
        num_steps=config.num_steps,
        LOG=config.score == "logprob",
        SKIPS_EMPTY=skips_empty,
        NODES=next_power_of_2(config.num_draft_tokens),
        BLOCK=block,
        num_warps=max(1, min(8, block // 64)),
    )
