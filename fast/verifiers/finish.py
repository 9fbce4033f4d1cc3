"""The end of a verification: the bonus token after every path, and the tokens and logprobs of the path."""

from typing import NamedTuple, no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.fast.runtime.launch import await_input, kernel, next_power_of_2
from specsim.fast.runtime.uniforms import FINAL
from specsim.fast.verifiers.path import LinkTables, PathTables
from specsim.fast.vocabulary.distribution import Distributions, logprob, only_token
from specsim.fast.vocabulary.draw import (
    PER,
    Requests,
    Siblings,
    Workspace,
    draw,
    drawn_group,
    groups_block,
    uniform_of,
)
from specsim.fast.vocabulary.summaries import GROUP


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


@kernel
@no_type_check
def _bonus_group_kernel(
    distributions,
    workspace,
    link_ptrs,
    rejected_ptr,
    requests,
    path_ptrs,
    rows_ptr,
    groups_ptr,
    num_nodes,
    num_steps,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the row from which one request's bonus token is drawn, and the token's group, -1 where none is drawn."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    drafts = tl.load(path_ptrs.num_drafts_ptr + request)
    uniform = uniform_of(requests, request, FINAL, length, tl.full((), 0, tl.int32))
    node = tl.load(path_ptrs.accept_index_ptr + request * (num_steps + 1) + drafts, mask=length > 0, other=0)
    last = tl.maximum(node, 0).to(tl.int64)
    first = tl.load(rejected_ptr + request)
    siblings = Siblings(link_ptrs.tokens_ptr + root, link_ptrs.next_sibling_ptr + root, first, num_nodes)
    chosen = tl.full((), -1, tl.int64)
    if (length > 0) & (tl.load(requests.temperature_ptr + request) > 0):
        group, _, _, _ = drawn_group(distributions, last, siblings, uniform, workspace, request, GROUP, GROUPS, PER)
        chosen = group.to(tl.int64)
    tl.store(rows_ptr + request, last)
    tl.store(groups_ptr + request, chosen)


def bonus_groups(
    batch: Batch,
    verify_input: VerifyInput,
    distributions: Distributions,
    config: SpecConfig,
    verdict: Verdict,
    rejected_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the row and the group of tokens that each bonus token is drawn from, i64 [B].

    The group of a greedy request is -1.
    """
    rows, groups = torch.empty(2, batch.size, dtype=torch.int64, device=rejected_B.device)
    _bonus_group_kernel[(batch.size,)](
        distributions=distributions.tables,
        workspace=Workspace.of(distributions, batch.size),
        link_ptrs=LinkTables.of(verify_input),
        rejected_ptr=rejected_B,
        requests=Requests.of(batch),
        path_ptrs=PathTables.of(verdict),
        rows_ptr=rows,
        groups_ptr=groups,
        num_nodes=config.num_draft_tokens,
        num_steps=config.num_steps,
        GROUP=GROUP,
        GROUPS=groups_block(distributions.logits.raw.shape[1]),
        PER=PER,
    )
    return rows, groups


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
    _finish_kernel[(batch.size,)](
        distributions=distributions.tables,
        workspace=Workspace.of(distributions, batch.size),
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
