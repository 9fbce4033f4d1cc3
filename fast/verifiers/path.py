"""Trees and accepted paths, as arguments of verifier kernels."""

from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.phases import Verdict, VerifyInput
from specsim.fast.runtime.launch import require_contiguous
from specsim.fast.runtime.uniforms import ACCEPT, named_uniform


class LinkTables(NamedTuple):
    """Links of trees as kernel arguments, i64 [B, N]."""

    tokens_ptr: torch.Tensor
    next_token_ptr: torch.Tensor
    next_sibling_ptr: torch.Tensor

    @classmethod
    def of(cls, tree: VerifyInput) -> Self:
        links = cls(tree.draft_tokens, tree.retrieve_next_token, tree.retrieve_next_sibling)
        require_contiguous(**links._asdict())
        return links


class PathTables(NamedTuple):
    """Accepted paths as kernel arguments."""

    accept_index_ptr: torch.Tensor  # i32 [B, S+1]
    num_drafts_ptr: torch.Tensor  # i32 [B]

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        return cls(verdict.accept_index, verdict.num_accepted_drafts)


class Limits(NamedTuple):
    """Sizes of a setting as kernel arguments."""

    num_nodes: int
    num_parents: int  # nodes whose children's distribution is kept
    num_steps: int
    max_len: int
    depths_ptr: torch.Tensor  # i32 [B], depth of the deepest draft of each tree


@triton.jit
@no_type_check
def depth_limit(limits, request, length):
    """Compute the depth of the deepest node that may be accepted, 0 in a padded request.

    No dead node is that deep.
    """
    drafted = tl.load(limits.depths_ptr + request)
    allowed = tl.maximum(tl.minimum(tl.minimum(limits.num_steps, drafted), limits.max_len - 1 - length), 0)
    return tl.where(length > 0, allowed, 0)


@triton.jit
@no_type_check
def accept_uniform(requests, uniforms_ptr, request, width, place, depth, lane):
    """Return a request's accept uniform: number `place` of the given ones, or drawn by its name."""
    if uniforms_ptr is None:
        seed = tl.load(requests.seeds_ptr + request)
        request_id = tl.load(requests.request_ids_ptr + request)
        length = tl.load(requests.seq_lens_ptr + request)
        uniform = named_uniform(seed, request_id, ACCEPT, length, depth, lane)
    else:
        uniform = tl.load(uniforms_ptr + request * width + place).to(tl.float32)
    return uniform


@triton.jit
@no_type_check
def store_chain(path_ptrs, request, root, length, drafts, num_steps):
    """Store a path of the first nodes of a chain."""
    accept_index_ptr = path_ptrs.accept_index_ptr + request * (num_steps + 1)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    for step in range(1, num_steps + 1):
        tl.store(accept_index_ptr + step, tl.where(step <= drafts, root + step, -1).to(tl.int32))
    tl.store(path_ptrs.num_drafts_ptr + request, drafts)


@triton.jit
@no_type_check
def store_path(path_ptrs, parents_ptr, request, root, length, node, drafts, num_steps):
    """Store the path to a node, whose depth is `drafts`."""
    accept_index_ptr = path_ptrs.accept_index_ptr + request * (num_steps + 1)
    for step in range(drafts):
        tl.store(accept_index_ptr + drafts - step, (root + node).to(tl.int32))
        node = tl.load(parents_ptr + root + node)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    for step in range(drafts + 1, num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(path_ptrs.num_drafts_ptr + request, drafts.to(tl.int32))
