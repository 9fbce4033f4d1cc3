"""The verifiers beside target-only sampling: one program a request decides, and what needs whole laws is done before.

Greedy requests have a law of one token and drafts without a law, for which every verifier follows that token.
"""

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.fast.runtime.launch import await_input, block_of, kernel
from specsim.fast.runtime.uniforms import ACCEPT, gumbel, named_uniform
from specsim.fast.vocabulary.distribution import Law, kept_mass, only_token, weight
from specsim.fast.vocabulary.draw import PER, groups_block
from specsim.fast.vocabulary.residual import draw_bonus, excess, excess_mass, excess_masses
from specsim.fast.vocabulary.summaries import GROUP

BLOCK = 2048  # tokens of a program


@triton.jit
def _limit(length, num_steps, max_len):
    """The deepest node that may be accepted, none in a padded request."""
    return tl.where(length > 0, tl.maximum(tl.minimum(num_steps, max_len - 1 - length), 0), 0)


@triton.jit
def _uniform(requests, uniforms_ptr, request, width, place, depth, lane):
    """An accept uniform: number `place` of the request's, or drawn by its name."""
    if uniforms_ptr is None:
        seed, request_id = tl.load(requests[2] + request), tl.load(requests[3] + request)
        uniform = named_uniform(seed, request_id, ACCEPT, tl.load(requests[1] + request), depth, lane)
    else:
        uniform = tl.load(uniforms_ptr + request * width + place).to(tl.float32)
    return uniform


@triton.jit
def _prob(laws, row, token):
    return weight(laws, row, token) / kept_mass(laws, row)


@triton.jit
def _store_chain(accept_index_ptr, num_drafts_ptr, request, root, length, drafts, num_steps):
    """A path of the first nodes of a chain."""
    accept_index_ptr += request * (num_steps + 1)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    for step in range(1, num_steps + 1):
        tl.store(accept_index_ptr + step, tl.where(step <= drafts, root + step, -1).to(tl.int32))
    tl.store(num_drafts_ptr + request, drafts)


@triton.jit
def _store_left(nodes_ptr, scales_ptr, request, node, target_scale, draft_scale):
    """What the bonus is drawn from: relu(a p - c q) of a node."""
    tl.store(nodes_ptr + request, node)
    tl.store(scales_ptr + request * 2, target_scale)
    tl.store(scales_ptr + request * 2 + 1, draft_scale)


@kernel
def _reject_kernel(
    laws, tokens_ptr, draft_prob_ptr, requests, uniforms_ptr, accept_index_ptr, num_drafts_ptr, nodes_ptr, scales_ptr,
    num_nodes, num_laws, num_steps, max_len, PDL: tl.constexpr,
):  # fmt: skip
    """Chain rejection (arXiv 2211.17192): accepted while uniform · q < p."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root, length, lane = request * num_nodes, tl.load(requests[1] + request), tl.full((), 0, tl.int32)
    limit, drafts = _limit(length, num_steps, max_len), tl.full((), 0, tl.int32)
    rejected = tl.full((), 0, tl.int32)
    while (drafts < limit) & (rejected == 0):
        token = tl.load(tokens_ptr + root + drafts + 1)
        draft_prob = tl.load(draft_prob_ptr + (request * num_laws + drafts) * laws[6] + token)
        uniform = _uniform(requests, uniforms_ptr, request, num_steps + 1, drafts, drafts, lane)
        rejected = tl.where(uniform * draft_prob < _prob(laws, root + drafts, token), 0, 1)
        drafts += 1 - rejected
    _store_chain(accept_index_ptr, num_drafts_ptr, request, root, length, drafts, num_steps)
    _store_left(nodes_ptr, scales_ptr, request, drafts.to(tl.int64), 1.0, rejected.to(tl.float32))


@kernel
def _ratios_kernel(
    laws, tokens_ptr, draft_prob_ptr, seq_lens_ptr, nodes_ptr, scales_ptr, num_nodes, num_laws, num_steps,
    PDL: tl.constexpr,
):  # fmt: skip
    """Block verification's w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)); row i asks for relu(w_i p - q) of node i."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root, kept = request * num_nodes, tl.full((), 1.0, tl.float32)
    for node in range(num_steps):
        row = request * num_steps + node
        tl.store(nodes_ptr + row, tl.full((), 0, tl.int64) + node)
        tl.store(scales_ptr + row * 2, kept)
        tl.store(scales_ptr + row * 2 + 1, 1.0)
        if tl.load(seq_lens_ptr + request) > 0:
            token = tl.load(tokens_ptr + root + node + 1)
            draft_prob = tl.load(draft_prob_ptr + (request * num_laws + node) * laws[6] + token)
            target = kept * _prob(laws, root + node, token)
            kept = tl.where(target < draft_prob, target / tl.where(draft_prob > 0, draft_prob, 1.0), 1.0)


@kernel
def _block_kernel(
    laws, tokens_ptr, draft_prob_ptr, requests, uniforms_ptr, ratios_ptr, masses_ptr, accept_index_ptr, num_drafts_ptr,
    nodes_ptr, scales_ptr, num_nodes, num_laws, num_steps, max_len, GROUPS: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Block verification (arXiv 2403.10444): every uniform is read, and the longest prefix that passes is accepted."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root, length, lane = request * num_nodes, tl.load(requests[1] + request), tl.full((), 0, tl.int32)
    limit, greedy = _limit(length, num_steps, max_len).to(tl.int32), tl.load(requests[0] + request) == 0
    drafts, follows, last_kept = tl.full((), 0, tl.int32), tl.full((), 1, tl.int32), tl.full((), 1.0, tl.float32)
    groups, count = tl.arange(0, GROUPS), tl.cdiv(laws[6], GROUP)
    for node in range(1, limit + 1):
        token, before = tl.load(tokens_ptr + root + node), request * num_steps + node - 1
        draft_prob = tl.load(draft_prob_ptr + (request * num_laws + node - 1) * laws[6] + token)
        target = tl.load(ratios_ptr + before * 2) * _prob(laws, root + node - 1, token)
        kept = tl.where(target < draft_prob, target / tl.where(draft_prob > 0, draft_prob, 1.0), 1.0)
        depth = (lane + node - 1).to(tl.int32)
        uniform = _uniform(requests, uniforms_ptr, request, num_steps + 1, node - 1, depth, lane)
        masses = tl.load(masses_ptr + (before + 1) * count + groups, mask=(groups < count) & (node < limit), other=0.0)
        mass = tl.sum(masses, axis=0)
        passes = tl.where(node < limit, uniform * (mass + 1 - kept) - mass, uniform - kept) < 0
        follows = tl.where(token == only_token(laws, root + node - 1), follows, 0)
        passes = tl.where(greedy, follows, tl.where(passes, 1, 0)) > 0
        drafts, last_kept = tl.where(passes, lane + node, drafts), tl.where(passes, kept, last_kept)
    _store_chain(accept_index_ptr, num_drafts_ptr, request, root, length, drafts, num_steps)
    left = tl.where(greedy | (drafts >= limit), 0.0, 1.0)
    _store_left(nodes_ptr, scales_ptr, request, drafts.to(tl.int64), tl.where(left > 0, last_kept, 1.0), left)


@kernel
def _multi_round_kernel(
    laws, tokens_ptr, next_token_ptr, next_sibling_ptr, draft_prob_ptr, requests, uniforms_ptr, accept_index_ptr,
    num_drafts_ptr, nodes_ptr, scales_ptr, num_nodes, num_laws, num_lanes, num_steps, max_len, GROUP: tl.constexpr,
    PER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SpecInfer (arXiv 2305.09781): siblings in order, each with a uniform of its own, against what those before
    left.
    """
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root, length = request * num_nodes, tl.load(requests[1] + request)
    limit, drafts = _limit(length, num_steps, max_len), tl.full((), 0, tl.int32)
    accept_index_ptr += request * (num_steps + 1)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    node, descending = tl.full((), 0, tl.int64), limit > 0
    draft_scale = tl.full((), 0.0, tl.float32)
    while descending:
        row, own = root + node, draft_prob_ptr + (request * num_laws + node) * laws[6]
        draft_scale, mass = tl.full((), 0.0, tl.float32), tl.full((), 1.0, tl.float32)
        child, accepted, tried = tl.load(next_token_ptr + row), tl.full((), -1, tl.int64), 0
        while (child > 0) & (child < num_nodes) & (accepted < 0) & (tried < num_lanes):
            token, lane = tl.load(tokens_ptr + root + child), ((child - 1) % num_lanes).to(tl.int32)
            uniform = _uniform(requests, uniforms_ptr, request, num_nodes, child, drafts, lane)
            bound = uniform * tl.load(own + token) * mass
            accepted = tl.where(bound < excess(laws, row, own, 1.0, draft_scale, token), child, -1)
            if accepted < 0:
                left = excess_mass(laws, row, own, draft_scale + mass, GROUP, PER)
                draft_scale, mass = (
                    tl.where(left > 0, draft_scale + mass, draft_scale),
                    tl.where(left > 0, left, mass),
                )
            child, tried = tl.load(next_sibling_ptr + root + child), tried + 1
        moved = accepted >= 0
        node, drafts = tl.where(moved, accepted, node), drafts + moved.to(tl.int32)
        draft_scale = tl.where(moved, 0.0, draft_scale)
        tl.store(accept_index_ptr + drafts, (root + node).to(tl.int32), mask=moved)
        descending = moved & (drafts < limit)
    for step in range(drafts + 1, num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(num_drafts_ptr + request, drafts)
    _store_left(nodes_ptr, scales_ptr, request, node, 1.0, draft_scale)


@kernel
def _thresholds_kernel(
    laws, temperature_ptr, thresholds_ptr, rows_per_request, epsilon, delta, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """min(ε, δ exp(-entropy)) of one row; 0 of a greedy one, whose law has one token."""
    row = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    threshold = tl.full((), 0.0, tl.float32)
    if tl.load(temperature_ptr + row // rows_per_request) > 0:
        entropy = tl.full((), 0.0, tl.float32)
        for start in range(0, laws[6], BLOCK):
            prob = _prob(laws, row, start + tl.arange(0, BLOCK))
            entropy -= tl.sum(tl.where(prob > 0, prob * tl.log(tl.where(prob > 0, prob, 1.0)), 0.0), axis=0)
        threshold = tl.minimum(epsilon, delta * tl.exp(-entropy))
    tl.store(thresholds_ptr + row, threshold)


@kernel
def _typical_kernel(
    laws, tokens_ptr, parents_ptr, thresholds_ptr, seq_lens_ptr, accept_index_ptr, num_drafts_ptr, rejected_ptr,
    num_nodes, num_steps, max_len, NODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Typical acceptance (Medusa, arXiv 2401.10774): of the deepest nodes that are acceptable with all their ancestors
    the one with the most probable path, of these the first.
    """
    request, offs = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    await_input(PDL)
    root, length = request * num_nodes, tl.load(seq_lens_ptr + request)
    limit = _limit(length, num_steps, max_len)
    depth, path_prob = tl.where(offs == 0, 0, -1), tl.where(offs == 0, 1.0, 0.0)
    for node in range(1, num_nodes):
        parent = tl.maximum(tl.load(parents_ptr + root + node), 0)
        above = tl.sum(tl.where(offs == parent, depth, 0), axis=0)
        prob = _prob(laws, root + parent, tl.load(tokens_ptr + root + node))
        is_typical = tl.where(prob > tl.load(thresholds_ptr + root + parent), above, -1)
        taken = tl.where((is_typical >= 0) & (is_typical < limit), node, -1)
        path_prob = tl.where(offs == taken, prob * tl.sum(tl.where(offs == parent, path_prob, 0.0), axis=0), path_prob)
        depth = tl.where(offs == taken, above + 1, depth)
    drafts = tl.max(depth, axis=0)
    path_prob = tl.where(depth == drafts, path_prob, -1.0)
    node = tl.min(tl.where(path_prob == tl.max(path_prob, axis=0), offs, NODES), axis=0).to(tl.int64)
    accept_index_ptr += request * (num_steps + 1)
    for step in range(drafts):
        tl.store(accept_index_ptr + drafts - step, (root + node).to(tl.int32))
        node = tl.load(parents_ptr + root + node)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    for step in range(drafts + 1, num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(num_drafts_ptr + request, drafts.to(tl.int32))
    tl.store(rejected_ptr + request, -1)


@kernel
def _noisy_kernel(laws, requests, scores_ptr, tokens_ptr, num_nodes, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Of some tokens the one with the best log p + noise of the position after one node of a chain."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    request, place = row // num_nodes, row * tl.num_programs(1) + block
    await_input(PDL)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    seed, request_id = tl.load(requests[2] + request), tl.load(requests[3] + request)
    length, largest, chosen = tl.load(requests[1] + request), tl.full((), -float("inf"), tl.float64), 0
    if length > 0:
        position, weights = length + row % num_nodes + 1, weight(laws, row, tokens)
        scores = tl.log(tl.where(weights > 0, weights, 1.0).to(tl.float64)) + gumbel(seed, request_id, position, tokens)
        scores = tl.where(weights > 0, scores, -float("inf"))
        largest = tl.max(scores, axis=0)
        chosen = tl.min(tl.where(scores == largest, tokens, laws[6] - 1), axis=0)
    tl.store(scores_ptr + place, largest)
    tl.store(tokens_ptr + place, chosen)


@kernel
def _gumbel_kernel(
    laws, noisy, draft_tokens_ptr, requests, accept_index_ptr, num_drafts_ptr, bonus_ptr, num_nodes, num_blocks,
    num_steps, max_len, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gumbel-max coupling (arXiv 2408.07978): drafts are accepted while they are the tokens that the target chose."""
    request, blocks = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    await_input(PDL)
    root, length = request * num_nodes, tl.load(requests[1] + request)
    limit, greedy = _limit(length, num_steps, max_len), tl.load(requests[0] + request) == 0
    drafts, going, bonus = tl.full((), 0, tl.int32), tl.full((), 1, tl.int32), tl.full((), 0, tl.int32)
    while going > 0:
        place = (root + drafts) * num_blocks
        scores = tl.load(noisy[0] + place + blocks, mask=blocks < num_blocks, other=-float("inf"))
        block = tl.min(tl.where(scores == tl.max(scores, axis=0), blocks, num_blocks - 1), axis=0)
        bonus = tl.where(greedy, only_token(laws, root + drafts), tl.load(noisy[1] + place + block))
        draft = tl.load(draft_tokens_ptr + root + drafts + 1, mask=drafts < limit, other=-1)
        going = tl.where(drafts < limit, (draft == bonus).to(tl.int32), 0)
        drafts += going
    _store_chain(accept_index_ptr, num_drafts_ptr, request, root, length, drafts, num_steps)
    tl.store(bonus_ptr + request, bonus)


def accept(
    batch: Batch,
    verify_input: VerifyInput,
    law: Law,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    out: Verdict,
    rejected_B: torch.Tensor,
) -> torch.Tensor | None:
    """Write accept_index and num_accepted_drafts; the bonus tokens i32 [B], or None where they are to be drawn from
    their node's whole law, of which rejected_B, then -1, takes nothing away.
    """
    sampling, paths = batch.sampling, (out.accept_index, out.num_accepted_drafts)
    requests = sampling.temperature, batch.seq_lens, batch.seeds, batch.request_ids
    if config.verifier == "typical":
        return _accept_typical(verify_input, law, requests, config, (*paths, rejected_B))
    if config.verifier == "gumbel":
        return _accept_gumbel(verify_input, law, requests, config, paths)
    accept_uniforms, final_uniforms = uniforms or (None, None)
    nodes_B = torch.empty(batch.size, dtype=torch.int64, device=law.moments.device)
    scales_B2 = torch.empty(batch.size, 2, dtype=torch.float32, device=law.moments.device)
    settle = {"rejection": _reject, "block": _accept_block, "multi_round": _accept_multi_round}[config.verifier]
    settle(verify_input, law, requests, accept_uniforms, config, (*paths, nodes_B, scales_B2))
    return draw_bonus(law, verify_input.draft_prob, nodes_B, scales_B2, requests, final_uniforms)


def _reject(verify_input: VerifyInput, law: Law, requests, uniforms, config: SpecConfig, out) -> None:
    draft_prob = verify_input.draft_prob
    _reject_kernel[(len(draft_prob),)](
        law.table, verify_input.draft_tokens, draft_prob, requests, uniforms, *out, config.num_draft_tokens,
        draft_prob.shape[1], config.num_steps, config.max_len,
    )  # fmt: skip


def _accept_block(verify_input: VerifyInput, law: Law, requests, uniforms, config: SpecConfig, out) -> None:
    draft_prob, (size, num_steps) = verify_input.draft_prob, (len(verify_input.draft_prob), config.num_steps)
    nodes = torch.empty(size * num_steps, dtype=torch.int64, device=draft_prob.device)
    ratios = torch.empty(size * num_steps, 2, dtype=torch.float32, device=draft_prob.device)
    settings = config.num_draft_tokens, draft_prob.shape[1], num_steps
    _ratios_kernel[(size,)](law.table, verify_input.draft_tokens, draft_prob, requests[1], nodes, ratios, *settings)
    masses = excess_masses(law, draft_prob, nodes, ratios, requests[1])
    _block_kernel[(size,)](
        law.table, verify_input.draft_tokens, draft_prob, requests, uniforms, ratios, masses, *out, *settings,
        config.max_len, GROUPS=groups_block(law.logits.raw.shape[1]), GROUP=GROUP,
    )  # fmt: skip


def _accept_multi_round(verify_input: VerifyInput, law: Law, requests, uniforms, config: SpecConfig, out) -> None:
    tree, draft_prob = verify_input, verify_input.draft_prob
    _multi_round_kernel[(len(draft_prob),)](
        law.table, tree.draft_tokens, tree.retrieve_next_token, tree.retrieve_next_sibling, draft_prob, requests,
        uniforms, *out, config.num_draft_tokens, draft_prob.shape[1], config.topk, config.num_steps, config.max_len,
        GROUP=GROUP, PER=PER,
    )  # fmt: skip


def _accept_typical(verify_input: VerifyInput, law: Law, requests, config: SpecConfig, out) -> None:
    num_rows, vocab_size = law.logits.raw.shape
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=law.moments.device)
    _thresholds_kernel[(num_rows,)](
        law.table, requests[0], thresholds, config.num_draft_tokens, config.typical_epsilon, config.typical_delta,
        BLOCK=block_of(vocab_size, BLOCK),
    )  # fmt: skip
    _typical_kernel[(len(requests[0]),)](
        law.table, verify_input.draft_tokens, verify_input.parents, thresholds, requests[1], *out,
        config.num_draft_tokens, config.num_steps, config.max_len,
        NODES=triton.next_power_of_2(config.num_draft_tokens),
    )  # fmt: skip


def _accept_gumbel(verify_input: VerifyInput, law: Law, requests, config: SpecConfig, out) -> torch.Tensor:
    (num_rows, vocab_size), device, size = law.logits.raw.shape, law.moments.device, len(requests[0])
    block = block_of(vocab_size, BLOCK)
    shape = num_rows, triton.cdiv(vocab_size, block)
    noisy = torch.empty(shape, dtype=torch.float64, device=device), torch.empty(shape, dtype=torch.int32, device=device)
    bonus = torch.empty(size, dtype=torch.int32, device=device)
    _noisy_kernel[shape](law.table, requests, *noisy, config.num_draft_tokens, BLOCK=block)
    _gumbel_kernel[(size,)](
        law.table, noisy, verify_input.draft_tokens, requests, *out, bonus, config.num_draft_tokens, shape[1],
        config.num_steps, config.max_len, BLOCKS=triton.next_power_of_2(shape[1]),
    )  # fmt: skip
    return bonus
