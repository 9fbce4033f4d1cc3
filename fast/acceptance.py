"""Verifiers other than target-only sampling: one program a request decides, after passes that need whole distributions.

Greedy requests have a distribution of one token and drafts without one, for which every verifier follows that token.
"""

from typing import NamedTuple, Self, no_type_check

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.fast.runtime.launch import (
    await_input,
    block_of,
    ceil_div,
    kernel,
    next_power_of_2,
    require_contiguous,
)
from specsim.fast.runtime.uniforms import ACCEPT, gumbel, named_uniform
from specsim.fast.vocabulary.distribution import Distributions, kept_mass, only_token, weight
from specsim.fast.vocabulary.draw import PER, BlockBests, Requests, best_token, groups_block, store_best
from specsim.fast.vocabulary.residual import (
    Residuals,
    draw_bonus,
    residual,
    residual_mass,
    residual_masses,
    store_residual,
)
from specsim.fast.vocabulary.summaries import GROUP

BLOCK = 2048  # tokens of a program


class LinkTables(NamedTuple):
    """Trees as kernels walk them, i64 [B, N]."""

    tokens_ptr: torch.Tensor
    next_token_ptr: torch.Tensor
    next_sibling_ptr: torch.Tensor

    @classmethod
    def of(cls, tree: VerifyInput) -> Self:
        links = cls(tree.draft_tokens, tree.retrieve_next_token, tree.retrieve_next_sibling)
        require_contiguous(**links._asdict())
        return links


class PathTables(NamedTuple):
    """Accepted paths as kernels write them."""

    accept_index_ptr: torch.Tensor  # i32 [B, S+1]
    num_drafts_ptr: torch.Tensor  # i32 [B]

    @classmethod
    def of(cls, verdict: Verdict) -> Self:
        return cls(verdict.accept_index, verdict.num_accepted_drafts)


class Limits(NamedTuple):
    """Sizes of a setting as kernels take them."""

    num_nodes: int
    num_parents: int  # nodes whose children's distribution is kept
    num_steps: int
    max_len: int


@triton.jit
@no_type_check
def _limit(limits, length):
    """Depth of the deepest node that may be accepted, 0 in a padded request."""
    allowed = tl.maximum(tl.minimum(limits.num_steps, limits.max_len - 1 - length), 0)
    return tl.where(length > 0, allowed, 0)


@triton.jit
@no_type_check
def _uniform(requests, uniforms_ptr, request, width, place, depth, lane):
    """Accept uniform of a request: number `place` of those given, or drawn by its name."""
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
def _prob(distributions, row, token):
    return weight(distributions, row, token) / kept_mass(distributions, row)


@triton.jit
@no_type_check
def _store_chain(path_ptrs, request, root, length, drafts, num_steps):
    """Note a path of the first nodes of a chain."""
    accept_index_ptr = path_ptrs.accept_index_ptr + request * (num_steps + 1)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    for step in range(1, num_steps + 1):
        tl.store(accept_index_ptr + step, tl.where(step <= drafts, root + step, -1).to(tl.int32))
    tl.store(path_ptrs.num_drafts_ptr + request, drafts)


@triton.jit
@no_type_check
def store_path(path_ptrs, parents_ptr, request, root, length, node, drafts, num_steps):
    """Note the path to a node, whose depth is `drafts`."""
    accept_index_ptr = path_ptrs.accept_index_ptr + request * (num_steps + 1)
    for step in range(drafts):
        tl.store(accept_index_ptr + drafts - step, (root + node).to(tl.int32))
        node = tl.load(parents_ptr + root + node)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    for step in range(drafts + 1, num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(path_ptrs.num_drafts_ptr + request, drafts.to(tl.int32))


@kernel
@no_type_check
def _reject_kernel(
    distributions,
    tokens_ptr,
    draft_prob_ptr,
    requests,
    uniforms_ptr,
    path_ptrs,
    residual_ptrs,
    limits,
    PDL: tl.constexpr,
):
    """Chain rejection (arXiv 2211.17192): accepted while uniform · q < p."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * limits.num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    lane = tl.full((), 0, tl.int32)
    limit = _limit(limits, length)
    drafts = tl.full((), 0, tl.int32)
    rejected = tl.full((), 0, tl.int32)
    while (drafts < limit) & (rejected == 0):
        token = tl.load(tokens_ptr + root + drafts + 1)
        own = (request * limits.num_parents + drafts) * distributions.vocab_size
        draft_prob = tl.load(draft_prob_ptr + own + token)
        uniform = _uniform(requests, uniforms_ptr, request, limits.num_steps + 1, drafts, drafts, lane)
        rejected = tl.where(uniform * draft_prob < _prob(distributions, root + drafts, token), 0, 1)
        drafts += 1 - rejected
    _store_chain(path_ptrs, request, root, length, drafts, limits.num_steps)
    store_residual(residual_ptrs, request, drafts.to(tl.int64), 1.0, rejected.to(tl.float32))


@triton.jit
@no_type_check
def _ratio(target, draft_prob):
    """min(1, target / draft_prob)."""
    return tl.where(target < draft_prob, target / tl.where(draft_prob > 0, draft_prob, 1.0), 1.0)


@kernel
@no_type_check
def _ratios_kernel(distributions, tokens_ptr, draft_prob_ptr, seq_lens_ptr, residual_ptrs, limits, PDL: tl.constexpr):
    """Block verification's w_0 = 1, w_i = min(1, w_(i-1) p(x_i) / q(x_i)); row i asks for relu(w_i p - q) of node i."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * limits.num_nodes
    kept = tl.full((), 1.0, tl.float32)
    for node in range(limits.num_steps):
        store_residual(residual_ptrs, request * limits.num_steps + node, tl.full((), 0, tl.int64) + node, kept, 1.0)
        if tl.load(seq_lens_ptr + request) > 0:
            token = tl.load(tokens_ptr + root + node + 1)
            own = (request * limits.num_parents + node) * distributions.vocab_size
            draft_prob = tl.load(draft_prob_ptr + own + token)
            kept = _ratio(kept * _prob(distributions, root + node, token), draft_prob)


@kernel
@no_type_check
def _block_kernel(
    distributions,
    tokens_ptr,
    draft_prob_ptr,
    requests,
    uniforms_ptr,
    ratios_ptr,
    masses_ptr,
    path_ptrs,
    residual_ptrs,
    limits,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Block verification (arXiv 2403.10444): every uniform is read, and the longest prefix that passes is accepted."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    num_steps = limits.num_steps
    root = request * limits.num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    lane = tl.full((), 0, tl.int32)
    limit = _limit(limits, length).to(tl.int32)
    greedy = tl.load(requests.temperature_ptr + request) == 0
    drafts = tl.full((), 0, tl.int32)
    follows = tl.full((), 1, tl.int32)
    last_kept = tl.full((), 1.0, tl.float32)
    groups = tl.arange(0, GROUPS)  # [GROUPS]
    num_groups = tl.cdiv(distributions.vocab_size, GROUP)
    for node in range(1, limit + 1):
        token = tl.load(tokens_ptr + root + node)
        before = request * num_steps + node - 1
        own = (request * limits.num_parents + node - 1) * distributions.vocab_size
        draft_prob = tl.load(draft_prob_ptr + own + token)
        kept = _ratio(tl.load(ratios_ptr + before * 2) * _prob(distributions, root + node - 1, token), draft_prob)
        depth = (lane + node - 1).to(tl.int32)
        uniform = _uniform(requests, uniforms_ptr, request, num_steps + 1, node - 1, depth, lane)
        mask = (groups < num_groups) & (node < limit)
        masses = tl.load(masses_ptr + (before + 1) * num_groups + groups, mask=mask, other=0.0)
        mass = tl.sum(masses, axis=0)
        passes = tl.where(node < limit, uniform * (mass + 1 - kept) - mass, uniform - kept) < 0
        follows = tl.where(token == only_token(distributions, root + node - 1), follows, 0)
        passes = tl.where(greedy, follows, tl.where(passes, 1, 0)) > 0
        drafts = tl.where(passes, lane + node, drafts)
        last_kept = tl.where(passes, kept, last_kept)
    _store_chain(path_ptrs, request, root, length, drafts, num_steps)
    left = tl.where(greedy | (drafts >= limit), 0.0, 1.0)
    store_residual(residual_ptrs, request, drafts.to(tl.int64), tl.where(left > 0, last_kept, 1.0), left)


@kernel
@no_type_check
def _multi_round_kernel(
    distributions,
    link_ptrs,
    draft_prob_ptr,
    requests,
    uniforms_ptr,
    path_ptrs,
    residual_ptrs,
    limits,
    num_lanes,
    GROUP: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """SpecInfer (arXiv 2305.09781): siblings in order, each with its own uniform, against the residual so far."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    num_nodes = limits.num_nodes
    root = request * num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    limit = _limit(limits, length)
    drafts = tl.full((), 0, tl.int32)
    accept_index_ptr = path_ptrs.accept_index_ptr + request * (limits.num_steps + 1)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    node = tl.full((), 0, tl.int64)
    descending = limit > 0
    draft_scale = tl.full((), 0.0, tl.float32)
    while descending:
        row = root + node
        own = draft_prob_ptr + (request * limits.num_parents + node) * distributions.vocab_size
        draft_scale = tl.full((), 0.0, tl.float32)
        mass = tl.full((), 1.0, tl.float32)
        child = tl.load(link_ptrs.next_token_ptr + row)
        accepted = tl.full((), -1, tl.int64)
        tried = 0
        while (child > 0) & (child < num_nodes) & (accepted < 0) & (tried < num_lanes):
            token = tl.load(link_ptrs.tokens_ptr + root + child)
            lane = ((child - 1) % num_lanes).to(tl.int32)
            uniform = _uniform(requests, uniforms_ptr, request, num_nodes, child, drafts, lane)
            bound = uniform * tl.load(own + token) * mass
            accepted = tl.where(bound < residual(distributions, row, own, 1.0, draft_scale, token), child, -1)
            if accepted < 0:
                left = residual_mass(distributions, row, own, draft_scale + mass, GROUP, PER)
                draft_scale = tl.where(left > 0, draft_scale + mass, draft_scale)
                mass = tl.where(left > 0, left, mass)
            child = tl.load(link_ptrs.next_sibling_ptr + root + child)
            tried += 1
        moved = accepted >= 0
        node = tl.where(moved, accepted, node)
        drafts += moved.to(tl.int32)
        draft_scale = tl.where(moved, 0.0, draft_scale)
        tl.store(accept_index_ptr + drafts, (root + node).to(tl.int32), mask=moved)
        descending = moved & (drafts < limit)
    for step in range(drafts + 1, limits.num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(path_ptrs.num_drafts_ptr + request, drafts)
    store_residual(residual_ptrs, request, node, 1.0, draft_scale)


@kernel
@no_type_check
def _thresholds_kernel(
    distributions,
    temperature_ptr,
    thresholds_ptr,
    rows_per_request,
    epsilon,
    delta,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """min(ε, δ exp(-entropy)) of one row; 0 of a greedy one, whose distribution has one token."""
    row = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    threshold = tl.full((), 0.0, tl.float32)
    if tl.load(temperature_ptr + row // rows_per_request) > 0:
        entropy = tl.full((), 0.0, tl.float32)
        for start in range(0, distributions.vocab_size, BLOCK):
            prob = _prob(distributions, row, start + tl.arange(0, BLOCK))  # [BLOCK]
            entropy -= tl.sum(tl.where(prob > 0, prob * tl.log(tl.where(prob > 0, prob, 1.0)), 0.0), axis=0)
        threshold = tl.minimum(epsilon, delta * tl.exp(-entropy))
    tl.store(thresholds_ptr + row, threshold)


@kernel
@no_type_check
def _typical_kernel(
    distributions,
    tokens_ptr,
    parents_ptr,
    thresholds_ptr,
    seq_lens_ptr,
    path_ptrs,
    rejected_ptr,
    limits,
    NODES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Typical acceptance (Medusa, arXiv 2401.10774): of the deepest nodes that are acceptable with all their ancestors
    the one with the most probable path, of these the first.
    """
    request = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, NODES)  # [NODES]
    await_input(PDL)
    root = request * limits.num_nodes
    length = tl.load(seq_lens_ptr + request)
    limit = _limit(limits, length)
    depth = tl.where(offs == 0, 0, -1)
    path_prob = tl.where(offs == 0, 1.0, 0.0)
    for node in range(1, limits.num_nodes):
        parent = tl.maximum(tl.load(parents_ptr + root + node), 0)
        above = tl.sum(tl.where(offs == parent, depth, 0), axis=0)
        prob = _prob(distributions, root + parent, tl.load(tokens_ptr + root + node))
        is_typical = tl.where(prob > tl.load(thresholds_ptr + root + parent), above, -1)
        taken = tl.where((is_typical >= 0) & (is_typical < limit), node, -1)
        path_prob = tl.where(offs == taken, prob * tl.sum(tl.where(offs == parent, path_prob, 0.0), axis=0), path_prob)
        depth = tl.where(offs == taken, above + 1, depth)
    drafts = tl.max(depth, axis=0)
    path_prob = tl.where(depth == drafts, path_prob, -1.0)
    node = tl.min(tl.where(path_prob == tl.max(path_prob, axis=0), offs, NODES), axis=0).to(tl.int64)
    store_path(path_ptrs, parents_ptr, request, root, length, node, drafts, limits.num_steps)
    tl.store(rejected_ptr + request, -1)


@kernel
@no_type_check
def _noisy_kernel(distributions, requests, bests, num_nodes, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Best token of a block by log p + noise of the position after one node of a chain."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    request = row // num_nodes
    await_input(PDL)
    tokens = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    seed = tl.load(requests.seeds_ptr + request)
    request_id = tl.load(requests.request_ids_ptr + request)
    length = tl.load(requests.seq_lens_ptr + request)
    scores = tl.full((BLOCK,), -float("inf"), tl.float64)
    if length > 0:
        weights = weight(distributions, row, tokens)
        noise = gumbel(seed, request_id, length + row % num_nodes + 1, tokens)
        scores = tl.log(tl.where(weights > 0, weights, 1.0).to(tl.float64)) + noise
        scores = tl.where(weights > 0, scores, -float("inf"))
    store_best(bests, row, block, tokens, scores, distributions.vocab_size - 1)


@kernel
@no_type_check
def _gumbel_kernel(
    distributions,
    bests,
    draft_tokens_ptr,
    requests,
    path_ptrs,
    bonus_ptr,
    limits,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Gumbel-max coupling (arXiv 2408.07978): drafts are accepted while they are the tokens that the target chose."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    root = request * limits.num_nodes
    length = tl.load(requests.seq_lens_ptr + request)
    limit = _limit(limits, length)
    greedy = tl.load(requests.temperature_ptr + request) == 0
    drafts = tl.full((), 0, tl.int32)
    going = tl.full((), 1, tl.int32)
    bonus = tl.full((), 0, tl.int32)
    while going > 0:
        noisy = best_token(bests, root + drafts, BLOCKS)
        bonus = tl.where(greedy, only_token(distributions, root + drafts), noisy)
        draft = tl.load(draft_tokens_ptr + root + drafts + 1, mask=drafts < limit, other=-1)
        going = tl.where(drafts < limit, (draft == bonus).to(tl.int32), 0)
        drafts += going
    _store_chain(path_ptrs, request, root, length, drafts, limits.num_steps)
    tl.store(bonus_ptr + request, bonus)


class Round(NamedTuple):
    """A round to verify: its trees, their nodes' distributions, and where paths go."""

    requests: Requests
    tree: VerifyInput
    distributions: Distributions
    config: SpecConfig
    paths: PathTables

    @property
    def draft_prob(self) -> torch.Tensor:
        if self.tree.draft_prob is None:
            raise ValueError(f"verifier {self.config.verifier!r} reads draft_prob; the tree has none")
        return self.tree.draft_prob

    @property
    def limits(self) -> Limits:
        config = self.config
        num_parents = 0 if self.tree.draft_prob is None else self.tree.draft_prob.shape[1]
        return Limits(config.num_draft_tokens, num_parents, config.num_steps, config.length_limit)


def accept(
    batch: Batch,
    verify_input: VerifyInput,
    distributions: Distributions,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    out: Verdict,
    rejected_B: torch.Tensor,
) -> torch.Tensor | None:
    """Write accept_index and num_accepted_drafts; give the bonus tokens i32 [B], None where they are yet to be drawn.

    They are drawn from their node's whole distribution then, as rejected_B, which becomes -1, says.
    """
    given = Round(Requests.of(batch), verify_input, distributions, config, PathTables.of(out))
    if config.verifier == "typical":
        _accept_typical(given, rejected_B)
        return None
    if config.verifier == "gumbel":
        return _accept_gumbel(given)
    accept_uniforms, final_uniforms = uniforms or (None, None)
    residuals = Residuals.empty(batch.size, distributions.moments.device)
    settle = {"rejection": _accept_rejection, "block": _accept_block, "multi_round": _accept_multi_round}
    settle[config.verifier](given, accept_uniforms, residuals)
    return draw_bonus(distributions, given.draft_prob, residuals, given.requests, final_uniforms)


def _accept_rejection(given: Round, uniforms: torch.Tensor | None, residuals: Residuals) -> None:
    _reject_kernel[(len(given.draft_prob),)](
        distributions=given.distributions.tables,
        tokens_ptr=given.tree.draft_tokens,
        draft_prob_ptr=given.draft_prob,
        requests=given.requests,
        uniforms_ptr=uniforms,
        path_ptrs=given.paths,
        residual_ptrs=residuals,
        limits=given.limits,
    )


def _accept_block(given: Round, uniforms: torch.Tensor | None, residuals: Residuals) -> None:
    size = len(given.draft_prob)
    prefixes = Residuals.empty(size * given.config.num_steps, given.draft_prob.device)
    _ratios_kernel[(size,)](
        distributions=given.distributions.tables,
        tokens_ptr=given.tree.draft_tokens,
        draft_prob_ptr=given.draft_prob,
        seq_lens_ptr=given.requests.seq_lens_ptr,
        residual_ptrs=prefixes,
        limits=given.limits,
    )
    _block_kernel[(size,)](
        distributions=given.distributions.tables,
        tokens_ptr=given.tree.draft_tokens,
        draft_prob_ptr=given.draft_prob,
        requests=given.requests,
        uniforms_ptr=uniforms,
        ratios_ptr=prefixes.scales_ptr,
        masses_ptr=residual_masses(given.distributions, given.draft_prob, prefixes, given.requests.seq_lens_ptr),
        path_ptrs=given.paths,
        residual_ptrs=residuals,
        limits=given.limits,
        GROUPS=groups_block(given.distributions.logits.raw.shape[1]),
        GROUP=GROUP,
    )


def _accept_multi_round(given: Round, uniforms: torch.Tensor | None, residuals: Residuals) -> None:
    _multi_round_kernel[(len(given.draft_prob),)](
        distributions=given.distributions.tables,
        link_ptrs=LinkTables.of(given.tree),
        draft_prob_ptr=given.draft_prob,
        requests=given.requests,
        uniforms_ptr=uniforms,
        path_ptrs=given.paths,
        residual_ptrs=residuals,
        limits=given.limits,
        num_lanes=given.config.topk,
        GROUP=GROUP,
        PER=PER,
    )


def _accept_typical(given: Round, rejected_B: torch.Tensor) -> None:
    num_rows, vocab_size = given.distributions.logits.raw.shape
    config = given.config
    thresholds = torch.empty(num_rows, dtype=torch.float32, device=rejected_B.device)
    _thresholds_kernel[(num_rows,)](
        distributions=given.distributions.tables,
        temperature_ptr=given.requests.temperature_ptr,
        thresholds_ptr=thresholds,
        rows_per_request=config.num_draft_tokens,
        epsilon=config.typical_epsilon,
        delta=config.typical_delta,
        BLOCK=block_of(vocab_size, BLOCK),
    )
    _typical_kernel[(len(rejected_B),)](
        distributions=given.distributions.tables,
        tokens_ptr=given.tree.draft_tokens,
        parents_ptr=given.tree.parents,
        thresholds_ptr=thresholds,
        seq_lens_ptr=given.requests.seq_lens_ptr,
        path_ptrs=given.paths,
        rejected_ptr=rejected_B,
        limits=given.limits,
        NODES=next_power_of_2(config.num_draft_tokens),
    )


def _accept_gumbel(given: Round) -> torch.Tensor:
    num_rows, vocab_size = given.distributions.logits.raw.shape
    device = given.distributions.moments.device
    size = len(given.requests.seq_lens_ptr)
    block = block_of(vocab_size, BLOCK)
    num_blocks = ceil_div(vocab_size, block)
    bests = BlockBests.empty(num_rows, num_blocks, device)
    bonus = torch.empty(size, dtype=torch.int32, device=device)
    _noisy_kernel[num_rows, num_blocks](
        distributions=given.distributions.tables,
        requests=given.requests,
        bests=bests,
        num_nodes=given.config.num_draft_tokens,
        BLOCK=block,
    )
    _gumbel_kernel[(size,)](
        distributions=given.distributions.tables,
        bests=bests,
        draft_tokens_ptr=given.tree.draft_tokens,
        requests=given.requests,
        path_ptrs=given.paths,
        bonus_ptr=bonus,
        limits=given.limits,
        BLOCKS=next_power_of_2(num_blocks),
    )
    return bonus
