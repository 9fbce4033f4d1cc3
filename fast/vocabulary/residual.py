"""Residual distributions after rejected drafts, relu(a p - c q): their mass, and draws from them.

After one rejected draft of distribution q the residual is relu(p - q). After several drawn from one q, each tested on
the residual of the one before, it is the same with a larger c: relu(relu(p - c q) / m - q) is relu(p - (c + m) q) / m
for m the mass before.
"""

from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.fast.runtime.launch import await_input, ceil_div, kernel, require_contiguous
from specsim.fast.runtime.uniforms import FINAL
from specsim.fast.vocabulary.distribution import (
    PER,
    Distributions,
    Requests,
    Workspace,
    draw,
    group_at,
    groups_block,
    only_token,
    prob_of,
    token_at,
    uniform_of,
)
from specsim.fast.vocabulary.summaries import GROUP, num_groups


class Residuals(NamedTuple):
    """Residuals relu(a p - c q) of R rows, the same number for each request, as kernel arguments."""

    nodes_ptr: torch.Tensor  # i64 [R], node of the row's request with its p and its children's q
    scales_ptr: torch.Tensor  # f32 [R, 2], a and c

    @classmethod
    def empty(cls, count: int, device: torch.device) -> Self:
        nodes = torch.empty(count, dtype=torch.int64, device=device)
        return cls(nodes, torch.empty(count, 2, dtype=torch.float32, device=device))


@triton.jit
@no_type_check
def store_residual(residual_ptrs, row, node, target_scale, draft_scale):
    """Store relu(a p - c q) of a node."""
    tl.store(residual_ptrs.nodes_ptr + row, node)
    tl.store(residual_ptrs.scales_ptr + row * 2, target_scale)
    tl.store(residual_ptrs.scales_ptr + row * 2 + 1, draft_scale)


@triton.jit
@no_type_check
def residual(distributions, row, draft_prob_ptr, target_scale, draft_scale, tokens):
    """Compute relu(a p - c q) of tokens.

    draft_prob_ptr, the row of q, is not read where c is 0.
    """
    end = tl.where(draft_scale > 0, distributions.vocab_size, 0)
    draft_prob = tl.load(draft_prob_ptr + tokens, mask=tokens < end, other=0.0)
    return tl.maximum(target_scale * prob_of(distributions, row, tokens) - draft_scale * draft_prob, 0.0)


@triton.jit
@no_type_check
def residual_mass(distributions, row, draft_prob_ptr, draft_scale, GROUP: tl.constexpr, PER: tl.constexpr):
    """Compute Σ relu(p - c q)."""
    mass = tl.full((), 0.0, tl.float32)
    for start in range(0, distributions.vocab_size, PER * GROUP):
        tokens = start + tl.arange(0, PER * GROUP)  # [PER * GROUP]
        mass += tl.sum(residual(distributions, row, draft_prob_ptr, 1.0, draft_scale, tokens), axis=0)
    return mass


@kernel
@no_type_check
def _masses_kernel(
    distributions,
    draft_prob_ptr,
    residual_ptrs,
    seq_lens_ptr,
    masses_ptr,
    rows_per_request,
    num_nodes,
    num_parents,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum the masses of some token groups of one row, 0 in a padded request."""
    vocab_size = distributions.vocab_size
    row = tl.program_id(0).to(tl.int64)
    request = row // rows_per_request
    groups = tl.program_id(1) * PER + tl.arange(0, PER)  # [PER]
    num_groups = tl.cdiv(vocab_size, GROUP)
    await_input(PDL)
    node = tl.load(residual_ptrs.nodes_ptr + row)
    masses = tl.zeros((PER,), tl.float32)
    if tl.load(seq_lens_ptr + request) > 0:
        draft_prob_ptr += (request * num_parents + node) * vocab_size
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [PER, GROUP]
        target_scale = tl.load(residual_ptrs.scales_ptr + row * 2)
        draft_scale = tl.load(residual_ptrs.scales_ptr + row * 2 + 1)
        weights = residual(distributions, request * num_nodes + node, draft_prob_ptr, target_scale, draft_scale, tokens)
        masses = tl.sum(weights, axis=1)  # [PER]
    tl.store(masses_ptr + row * num_groups + groups, masses, mask=groups < num_groups)


def residual_masses(
    distributions: Distributions, draft_prob: torch.Tensor, residuals: Residuals, seq_lens_B: torch.Tensor
) -> torch.Tensor:
    """Compute the mass of every token group of residuals, f32 [R, G]."""
    require_contiguous(draft_prob=draft_prob, nodes=residuals.nodes_ptr, scales=residuals.scales_ptr)
    num_rows, vocab_size = distributions.logits.raw.shape
    size = max(1, len(seq_lens_B))
    count = len(residuals.nodes_ptr)
    masses = torch.empty(count, num_groups(vocab_size), dtype=torch.float32, device=draft_prob.device)
    _masses_kernel[count, ceil_div(num_groups(vocab_size), PER)](
        distributions=distributions.tables,
        draft_prob_ptr=draft_prob,
        residual_ptrs=residuals,
        seq_lens_ptr=seq_lens_B,
        masses_ptr=masses,
        rows_per_request=max(1, count // size),
        num_nodes=num_rows // size,
        num_parents=draft_prob.shape[1],
        GROUP=GROUP,
        PER=PER,
    )
    return masses


@kernel
@no_type_check
def _bonus_kernel(
    distributions,
    workspace,
    draft_prob_ptr,
    residual_ptrs,
    masses_ptr,
    requests,
    uniforms_ptr,
    bonus_ptr,
    num_nodes,
    num_parents,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draw the bonus token of one request from its residual, or from p if that has no mass."""
    vocab_size = distributions.vocab_size
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    node = tl.load(residual_ptrs.nodes_ptr + request)
    length = tl.load(requests.seq_lens_ptr + request)
    row = request * num_nodes + node
    num_groups = tl.cdiv(vocab_size, GROUP)
    bonus = only_token(distributions, row)
    if tl.load(requests.temperature_ptr + request) > 0:
        if uniforms_ptr is None:
            uniform = uniform_of(requests, request, FINAL, length, tl.full((), 0, tl.int32))
        else:
            uniform = tl.load(uniforms_ptr + request).to(tl.float32)
        groups = tl.arange(0, GROUPS)  # [GROUPS]
        masses = tl.load(masses_ptr + request * num_groups + groups, mask=groups < num_groups, other=0.0)
        if tl.sum(masses, axis=0) > 0:
            group, before, bound = group_at(masses, uniform, GROUPS)
            tokens = group * GROUP + tl.arange(0, GROUP)  # [GROUP]
            draft_prob_ptr += (request * num_parents + node) * vocab_size
            target_scale = tl.load(residual_ptrs.scales_ptr + request * 2)
            draft_scale = tl.load(residual_ptrs.scales_ptr + request * 2 + 1)
            weights = residual(distributions, row, draft_prob_ptr, target_scale, draft_scale, tokens)
            bonus = token_at(tokens, weights, before, bound, vocab_size)
        else:
            bonus = draw(distributions, row, None, uniform, workspace, request, GROUP, GROUPS, PER)
    tl.store(bonus_ptr + request, bonus)


def draw_bonus(
    distributions: Distributions,
    draft_prob: torch.Tensor,
    residuals: Residuals,
    requests: Requests,
    uniforms: torch.Tensor | None,
) -> torch.Tensor:
    """Draw the bonus token of every request, i32 [B], from its residual, or from p if that has no mass."""
    size = len(residuals.nodes_ptr)
    bonus = torch.empty(size, dtype=torch.int32, device=draft_prob.device)
    _bonus_kernel[(size,)](
        distributions=distributions.tables,
        workspace=Workspace.of(distributions, size),
        draft_prob_ptr=draft_prob,
        residual_ptrs=residuals,
        masses_ptr=residual_masses(distributions, draft_prob, residuals, requests.seq_lens_ptr),
        requests=requests,
        uniforms_ptr=uniforms,
        bonus_ptr=bonus,
        num_nodes=len(distributions.moments) // max(1, size),
        num_parents=draft_prob.shape[1],
        GROUP=GROUP,
        GROUPS=groups_block(distributions.logits.raw.shape[1]),
        PER=PER,
    )
    return bonus
