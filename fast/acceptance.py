"""The setting's verifier on the trees of a batch, and the end of a verification.

A greedy request has a one-token distribution and drafts without one. For it every verifier accepts that token.
core.verifiers names the file of each verifier.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.verifiers import resolve
from specsim.fast.runtime.launch import await_input, kernel, next_power_of_2, require_contiguous
from specsim.fast.runtime.uniforms import ACCEPT, FINAL, named_uniform
from specsim.fast.vocabulary.distribution import (
    PER,
    Distributions,
    Requests,
    Siblings,
    Workspace,
    draw,
    groups_block,
    logprob,
    only_token,
    uniform_of,
)
from specsim.fast.vocabulary.residual import Residuals, draw_bonus
from specsim.fast.vocabulary.summaries import GROUP


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
def accept_uniform(requests, uniforms_ptr, request, width, column, depth, lane):
    """Return a request's accept uniform: entry `column` of `uniforms_ptr`, or drawn by its name."""
    if uniforms_ptr is None:
        seed = tl.load(requests.seeds_ptr + request)
        request_id = tl.load(requests.request_ids_ptr + request)
        length = tl.load(requests.seq_lens_ptr + request)
        uniform = named_uniform(seed, request_id, ACCEPT, length, depth, lane)
    else:
        uniform = tl.load(uniforms_ptr + request * width + column).to(tl.float32)
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


@dataclass(frozen=True, slots=True)
class Verification:
    """Trees to verify, their nodes' distributions, and the paths to write."""

    requests: Requests
    tree: VerifyInput
    distributions: Distributions
    config: SpecConfig
    accept_uniforms: torch.Tensor | None  # [B, S+1] by depth or [B, N] by node; None: drawn by their names
    final_uniforms: torch.Tensor | None  # [B]; None: drawn by their names
    paths: PathTables
    rejected_B: torch.Tensor  # i64, first of the rejected children of a path's last node, -1 for none

    @property
    def draft_prob(self) -> torch.Tensor:
        """Distribution q by parent, f32 [B, M, V], or ValueError where the tree has none."""
        if self.tree.draft_prob is None:
            raise ValueError(f"verifier {self.config.verifier!r} reads draft_prob; the tree has none")
        return self.tree.draft_prob

    @property
    def limits(self) -> Limits:
        config = self.config
        num_parents = 0 if self.tree.draft_prob is None else self.tree.draft_prob.shape[1]
        depths = self.tree.proposed_depth
        return Limits(config.num_draft_tokens, num_parents, config.num_steps, config.length_limit, depths)

    def draw_bonus(self, residuals: Residuals) -> torch.Tensor:
        """Draw the bonus tokens, i32 [B], from the residual distributions."""
        return draw_bonus(self.distributions, self.draft_prob, residuals, self.requests, self.final_uniforms)


def accept(
    batch: Batch,
    verify_input: VerifyInput,
    distributions: Distributions,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    out: Verdict,
    rejected_B: torch.Tensor,
) -> torch.Tensor | None:
    """Write accept_index and num_accepted_drafts, and return the bonus tokens i32 [B], or None.

    None: the bonus is still to be drawn from the distribution of the path's last node without its rejected children.
    The first rejected child is written to rejected_B, -1 where there is none.
    """
    accept_uniforms, final_uniforms = uniforms or (None, None)
    inputs = Verification(
        requests=Requests.of(batch),
        tree=verify_input,
        distributions=distributions,
        config=config,
        accept_uniforms=accept_uniforms,
        final_uniforms=final_uniforms,
        paths=PathTables.of(out),
        rejected_B=rejected_B,
    )
    return resolve(config.verifier_kind.fast)(inputs)


class VerdictTables(NamedTuple):
    """Fields of a verdict that are written after the walk, as kernel arguments."""

    num_tokens_ptr: torch.Tensor
    predict_ptr: torch.Tensor
    logprobs_ptr: torch.Tensor


@kernel
@no_type_check
def _finish_kernel(
    distributions,
    workspace,
    link_ptrs,
    rejected_ptr,
    requests,
    uniforms_ptr,
    bonus_ptr,
    path_ptrs,
    verdict_ptrs,
    num_nodes,
    num_steps,
    NODES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw the bonus token of one request, and write the tokens and logprobs of its path."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    drafts = tl.load(path_ptrs.num_drafts_ptr + request)
    if uniforms_ptr is None:
        uniform = uniform_of(requests, request, FINAL, length, tl.full((), 0, tl.int32))
    else:
        uniform = tl.load(uniforms_ptr + request).to(tl.float32)
    offs = tl.arange(0, NODES)  # [NODES]
    accept_index_ptr = path_ptrs.accept_index_ptr + request * (num_steps + 1)
    inside = offs <= num_steps
    path = tl.load(accept_index_ptr + offs, mask=inside, other=-1).to(tl.int64)  # -1 after its end
    following = tl.load(accept_index_ptr + offs + 1, mask=offs < num_steps, other=-1)
    last = tl.maximum(tl.max(tl.where(offs == drafts, path, -1), axis=0), 0)
    drafted = tl.load(link_ptrs.tokens_ptr + following, mask=following >= 0, other=0).to(tl.int32)
    logprobs = logprob(distributions, path, drafted, following >= 0)  # before the draw, which waits for its own loads
    if bonus_ptr is None:
        first = tl.load(rejected_ptr + request)
        siblings = Siblings(link_ptrs.tokens_ptr + root, link_ptrs.next_sibling_ptr + root, first, num_nodes)
        bonus = only_token(distributions, last)
        if tl.load(requests.temperature_ptr + request) > 0:  # a greedy walk rejects no child with the token
            bonus = draw(distributions, last, siblings, uniform, workspace, request, GROUP, GROUPS, PER)
    else:
        bonus = tl.load(bonus_ptr + request)
    after = tl.where(offs == drafts, bonus, drafted)
    logprobs = tl.where(offs == drafts, logprob(distributions, last, bonus, length > 0), logprobs)
    tl.store(verdict_ptrs.num_tokens_ptr + request, drafts + 1)
    tl.store(verdict_ptrs.logprobs_ptr + request * (num_steps + 1) + offs, logprobs, mask=inside)
    tl.store(verdict_ptrs.predict_ptr + root + offs, tl.full((NODES,), -1, tl.int32), mask=offs < num_nodes)
    tl.debug_barrier()
    tl.store(verdict_ptrs.predict_ptr + path, after, mask=path >= 0)


def finish(
    batch: Batch,
    verify_input: VerifyInput,
    distributions: Distributions,
    final_uniforms: torch.Tensor | None,
    bonus_B: torch.Tensor | None,
    config: SpecConfig,
    verdict: Verdict,
    rejected_B: torch.Tensor,
) -> None:
    """Write the rest of a verdict whose paths are known; bonus_B: bonus tokens that are drawn already."""
    num_requests = len(rejected_B)
    _finish_kernel[(num_requests,)](
        distributions=distributions.tables,
        workspace=Workspace.of(distributions, num_requests),
        link_ptrs=LinkTables.of(verify_input),
        rejected_ptr=rejected_B,
        requests=Requests.of(batch),
        uniforms_ptr=final_uniforms,
        bonus_ptr=bonus_B,
        path_ptrs=PathTables.of(verdict),
        verdict_ptrs=VerdictTables(verdict.num_accepted_tokens, verdict.predict, verdict.logprobs),
        num_nodes=config.num_draft_tokens,
        num_steps=config.num_steps,
        NODES=next_power_of_2(max(config.num_draft_tokens, config.num_steps + 1)),
        GROUP=GROUP,
        GROUPS=groups_block(distributions.logits.raw.shape[1]),
        PER=PER,
    )
