"""What is left of a target's law after rejected drafts: relu(a p - c q), its mass, and draws from it.

One rejected draft of law q leaves relu(p - q). Several drawn from one q, each from what the one before left, leave the
same with a larger c: relu(relu(p - c q) / m - q) is relu(p - (c + m) q) / m for m the mass before.
"""

import torch
import triton
import triton.language as tl

from specsim.fast.runtime.launch import await_input, kernel, require_contiguous
from specsim.fast.runtime.uniforms import FINAL, named_uniform
from specsim.fast.vocabulary.distribution import Law, kept_mass, only_token, weight
from specsim.fast.vocabulary.draw import PER, draw, group_at, groups_block, token_at, workspace
from specsim.fast.vocabulary.summaries import GROUP, num_groups


@triton.jit
def excess(laws, row, draft_prob_ptr, target_scale, draft_scale, tokens):
    """relu(a p - c q) of tokens; draft_prob_ptr, the row of q, is not read where c is 0."""
    end = tl.where(draft_scale > 0, laws[6], 0)
    draft_prob = tl.load(draft_prob_ptr + tokens, mask=tokens < end, other=0.0)
    return tl.maximum(target_scale * (weight(laws, row, tokens) / kept_mass(laws, row)) - draft_scale * draft_prob, 0.0)


@triton.jit
def excess_mass(laws, row, draft_prob_ptr, draft_scale, GROUP: tl.constexpr, PER: tl.constexpr):
    """Σ relu(p - c q)."""
    mass = tl.full((), 0.0, tl.float32)
    for start in range(0, laws[6], PER * GROUP):
        tokens = start + tl.arange(0, PER * GROUP)
        mass += tl.sum(excess(laws, row, draft_prob_ptr, 1.0, draft_scale, tokens), axis=0)
    return mass


@kernel
def _masses_kernel(
    laws, draft_prob_ptr, nodes_ptr, scales_ptr, seq_lens_ptr, masses_ptr, per_request, num_nodes, num_laws,
    GROUP: tl.constexpr, PER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The mass of some groups of tokens of one row; none in a padded request."""
    row = tl.program_id(0).to(tl.int64)
    request, groups, count = row // per_request, tl.program_id(1) * PER + tl.arange(0, PER), tl.cdiv(laws[6], GROUP)
    await_input(PDL)
    node, masses = tl.load(nodes_ptr + row), tl.zeros((PER,), tl.float32)
    if tl.load(seq_lens_ptr + request) > 0:
        draft_prob_ptr += (request * num_laws + node) * laws[6]
        tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        target_scale, draft_scale = tl.load(scales_ptr + row * 2), tl.load(scales_ptr + row * 2 + 1)
        left = excess(laws, request * num_nodes + node, draft_prob_ptr, target_scale, draft_scale, tokens)
        masses = tl.sum(left, axis=1)
    tl.store(masses_ptr + row * count + groups, masses, mask=groups < count)


def excess_masses(
    law: Law, draft_prob: torch.Tensor, nodes_R: torch.Tensor, scales_R2: torch.Tensor, seq_lens_B: torch.Tensor
) -> torch.Tensor:
    """The mass of relu(a p - c q) in every group of tokens, f32 [R, G], as many rows for each request.

    nodes_R: i64, the node of its request whose p and whose children's q a row takes. scales_R2: f32, its a and c.
    """
    require_contiguous(draft_prob=draft_prob, nodes=nodes_R, scales=scales_R2)
    (num_rows, vocab_size), size = law.logits.raw.shape, max(1, len(seq_lens_B))
    masses = torch.empty(len(nodes_R), num_groups(vocab_size), dtype=torch.float32, device=draft_prob.device)
    _masses_kernel[len(nodes_R), triton.cdiv(num_groups(vocab_size), PER)](
        law.table, draft_prob, nodes_R, scales_R2, seq_lens_B, masses, max(1, len(nodes_R) // size), num_rows // size,
        draft_prob.shape[1], GROUP=GROUP, PER=PER,
    )  # fmt: skip
    return masses


@kernel
def _bonus_kernel(
    laws, space, draft_prob_ptr, nodes_ptr, scales_ptr, masses_ptr, requests, uniforms_ptr, bonus_ptr, num_nodes,
    num_laws, GROUP: tl.constexpr, GROUPS: tl.constexpr, PER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    temperature_ptr, seq_lens_ptr, seeds_ptr, request_ids_ptr = requests
    await_input(PDL)
    node, length = tl.load(nodes_ptr + request), tl.load(seq_lens_ptr + request)
    row, own = request * num_nodes + node, request * tl.cdiv(laws[6], GROUP)
    bonus = only_token(laws, row)
    if tl.load(temperature_ptr + request) > 0:
        if uniforms_ptr is None:
            seed, request_id = tl.load(seeds_ptr + request), tl.load(request_ids_ptr + request)
            uniform = named_uniform(seed, request_id, FINAL, length, tl.full((), 0, tl.int32), tl.full((), 0, tl.int32))
        else:
            uniform = tl.load(uniforms_ptr + request).to(tl.float32)
        groups = tl.arange(0, GROUPS)
        masses = tl.load(masses_ptr + own + groups, mask=groups < tl.cdiv(laws[6], GROUP), other=0.0)
        if tl.sum(masses, axis=0) > 0:
            group, before, bound = group_at(masses, uniform, GROUPS)
            tokens = group * GROUP + tl.arange(0, GROUP)
            draft_prob_ptr += (request * num_laws + node) * laws[6]
            target_scale, draft_scale = tl.load(scales_ptr + request * 2), tl.load(scales_ptr + request * 2 + 1)
            left = excess(laws, row, draft_prob_ptr, target_scale, draft_scale, tokens)
            bonus = token_at(tokens, left, before, bound, laws[6])
        else:
            bonus = draw(laws, row, None, uniform, (space[0] + own, space[1] + own), GROUP, GROUPS, PER)
    tl.store(bonus_ptr + request, bonus)


def draw_bonus(
    law: Law, draft_prob: torch.Tensor, nodes_B: torch.Tensor, scales_B2: torch.Tensor, requests, uniforms
) -> torch.Tensor:
    """The bonus token of every request i32 [B], from relu(a p - c q) of its node, or from p if that is nothing."""
    size, num_nodes = len(nodes_B), len(law.moments) // max(1, len(nodes_B))
    bonus = torch.empty(size, dtype=torch.int32, device=draft_prob.device)
    masses = excess_masses(law, draft_prob, nodes_B, scales_B2, requests[1])
    _bonus_kernel[(size,)](
        law.table, workspace(law, size), draft_prob, nodes_B, scales_B2, masses, requests, uniforms, bonus, num_nodes,
        draft_prob.shape[1], GROUP=GROUP, GROUPS=groups_block(law.logits.raw.shape[1]), PER=PER,
    )  # fmt: skip
    return bonus
