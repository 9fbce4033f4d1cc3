"""Verification of every tree of a batch: laws of all nodes at once, then one program a request for walk and draw."""

import torch
import triton
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.pool import KVPool
from specsim.fast.acceptance import accept
from specsim.fast.runtime.launch import await_input, kernel, require_contiguous
from specsim.fast.runtime.uniforms import ACCEPT, FINAL, PREFILL, named_uniform
from specsim.fast.sampling import laws
from specsim.fast.synthetic import Schedule, follow
from specsim.fast.vocabulary.distribution import kept_mass, logprob, only_token, weight
from specsim.fast.vocabulary.draw import PER, draw, groups_block, workspace
from specsim.fast.vocabulary.penalties import Allowed, Logits, adjust_logits
from specsim.fast.vocabulary.summaries import GROUP


def node_logits(
    batch: Batch,
    verify_input: VerifyInput,
    logits_RV: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    allowed: Allowed | None = None,
) -> Logits:
    """Every node's logits after penalties, bias and mask; penalties `exact` count a node's path, `relaxed` the root."""
    levels = config.num_steps + 1 if config.penalties == "exact" else 1
    tree = verify_input.draft_tokens, verify_input.parents
    return adjust_logits(batch, logits_RV, pools, tree, levels, allowed)


@triton.jit
def _accepted_child(laws, row, siblings, uniform, threshold_single, threshold_acc):
    """The first of the siblings that the uniform accepts at a row, -1 if none; siblings as of vocabulary.draw."""
    tokens_ptr, next_sibling_ptr, child, num_nodes = siblings
    mass, accumulated = kept_mass(laws, row), tl.full((), 0, tl.float32)
    accepted, tried = tl.full((), -1, tl.int64), 0
    while (child >= 0) & (child < num_nodes) & (accepted < 0) & (tried < num_nodes):
        child_weight = weight(laws, row, tl.load(tokens_ptr + child))
        accumulated += child_weight
        enough = uniform * (threshold_acc * mass) <= accumulated
        accepted = tl.where(enough | (child_weight >= threshold_single * mass), child, accepted)
        child, tried = tl.load(next_sibling_ptr + child), tried + 1
    return accepted


@kernel
def _walk(
    laws,
    tokens_ptr,
    next_token_ptr,
    next_sibling_ptr,
    requests,
    uniforms_ptr,
    accept_index_ptr,
    num_drafts_ptr,
    rejected_ptr,
    num_nodes,
    num_steps,
    max_len,
    threshold_single,
    threshold_acc,
    PDL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    temperature_ptr, seq_lens_ptr, seeds_ptr, request_ids_ptr = requests
    await_input(PDL)
    root, length = request * num_nodes, tl.load(seq_lens_ptr + request)
    seed, request_id = tl.load(seeds_ptr + request), tl.load(request_ids_ptr + request)
    greedy = tl.load(temperature_ptr + request) == 0
    single, acc = tl.where(greedy, 1.0, threshold_single), tl.where(greedy, 1.0, threshold_acc)
    limit = tl.where(length > 0, tl.minimum(num_steps, max_len - 1 - length), 0)
    accept_index_ptr += request * (num_steps + 1)
    tl.store(accept_index_ptr, tl.where(length > 0, root, -1).to(tl.int32))
    node, drafts, rejected = tl.full((), 0, tl.int64), tl.full((), 0, tl.int32), tl.full((), -1, tl.int64)
    descending = limit > 0
    while descending:
        if uniforms_ptr is None:
            uniform = named_uniform(seed, request_id, ACCEPT, length, drafts, tl.full((), 0, tl.int32))
        else:
            uniform = tl.load(uniforms_ptr + request * (num_steps + 1) + drafts).to(tl.float32)
        first = tl.load(next_token_ptr + root + node)
        siblings = (tokens_ptr + root, next_sibling_ptr + root, first, num_nodes)
        child = _accepted_child(laws, root + node, siblings, uniform, single, acc)
        accepted = child >= 0
        rejected, node = tl.where(accepted, -1, first), tl.where(accepted, child, node)
        drafts += accepted.to(tl.int32)
        tl.store(accept_index_ptr + drafts, (root + child).to(tl.int32), mask=accepted)
        descending = accepted & (drafts < limit)
    for step in range(drafts + 1, num_steps + 1):
        tl.store(accept_index_ptr + step, -1)
    tl.store(num_drafts_ptr + request, drafts)
    tl.store(rejected_ptr + request, rejected)


@kernel
def _finish(
    laws,
    space,
    tokens_ptr,
    next_sibling_ptr,
    rejected_ptr,
    requests,
    uniforms_ptr,
    bonus_ptr,
    accept_index_ptr,
    num_drafts_ptr,
    num_tokens_ptr,
    predict_ptr,
    logprobs_ptr,
    num_nodes,
    num_steps,
    NODES: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    temperature_ptr, seq_lens_ptr, seeds_ptr, request_ids_ptr = requests
    await_input(PDL)
    root, length, drafts = request * num_nodes, tl.load(seq_lens_ptr + request), tl.load(num_drafts_ptr + request)
    if uniforms_ptr is None:
        seed, request_id = tl.load(seeds_ptr + request), tl.load(request_ids_ptr + request)
        uniform = named_uniform(seed, request_id, FINAL, length, tl.full((), 0, tl.int32), tl.full((), 0, tl.int32))
    else:
        uniform = tl.load(uniforms_ptr + request).to(tl.float32)
    offs = tl.arange(0, NODES)
    accept_index_ptr += request * (num_steps + 1)
    path = tl.load(accept_index_ptr + offs, mask=(offs <= drafts) & (length > 0), other=-1).to(tl.int64)
    following = tl.load(accept_index_ptr + offs + 1, mask=offs < drafts, other=0)
    last = tl.maximum(tl.max(tl.where(offs == drafts, path, -1), axis=0), 0)
    if bonus_ptr is None:
        siblings = (tokens_ptr + root, next_sibling_ptr + root, tl.load(rejected_ptr + request), num_nodes)
        bonus = only_token(laws, last)
        if tl.load(temperature_ptr + request) > 0:  # a greedy walk rejects no child with the token
            own = request * tl.cdiv(laws[6], GROUP)
            bonus = draw(laws, last, siblings, uniform, (space[0] + own, space[1] + own), GROUP, GROUPS, PER)
    else:
        bonus = tl.load(bonus_ptr + request)
    after = tl.where(offs == drafts, bonus, tl.load(tokens_ptr + following, mask=offs < drafts, other=0).to(tl.int32))
    logprobs = logprob(laws, path, after, path >= 0)
    tl.store(num_tokens_ptr + request, drafts + 1)
    tl.store(logprobs_ptr + request * (num_steps + 1) + offs, logprobs, mask=offs <= num_steps)
    tl.store(predict_ptr + root + offs, tl.full((NODES,), -1, tl.int32), mask=offs < num_nodes)
    tl.debug_barrier()
    tl.store(predict_ptr + path, after, mask=path >= 0)


def _empty(batch: Batch, config: SpecConfig, device: torch.device) -> Verdict:
    width = batch.size, config.num_steps + 1
    int32 = dict(dtype=torch.int32, device=device)
    return Verdict(
        predict=torch.empty(batch.size * config.num_draft_tokens, **int32),
        accept_index=torch.empty(width, **int32),
        num_accepted_drafts=torch.empty(batch.size, **int32),
        num_accepted_tokens=torch.empty(batch.size, **int32),
        logprobs=torch.empty(width, dtype=torch.float32, device=device),
    )


def walk(
    batch: Batch,
    verify_input: VerifyInput,
    logits: Logits,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    acceptance: Schedule | None = None,
    *,
    out: Verdict | None = None,
) -> Verdict:
    """Walk every tree: target-only sampling, of which greedy is that of one-hot distributions, or another verifier.

    logits: of every node as node_logits gives them. uniforms, acceptance: as of `verify`.
    """
    law = laws(batch, logits)
    verdict, sampling = out or _empty(batch, config, law.moments.device), batch.sampling
    num_nodes, num_steps = config.num_draft_tokens, config.num_steps
    tokens, next_token = verify_input.draft_tokens, verify_input.retrieve_next_token
    next_sibling, (accept_uniforms, final_uniforms) = verify_input.retrieve_next_sibling, uniforms or (None, None)
    require_contiguous(draft_tokens=tokens, next_token=next_token, next_sibling=next_sibling)
    requests = sampling.temperature, batch.seq_lens, batch.seeds, batch.request_ids
    rejected_B, bonus_B = torch.empty(batch.size, dtype=torch.int64, device=law.moments.device), None
    if acceptance is not None:
        follow(batch, verify_input, acceptance, config, verdict, rejected_B)
    elif config.verifier != "target_only":
        bonus_B = accept(batch, verify_input, law, uniforms, config, verdict, rejected_B)
    else:
        _walk[(batch.size,)](
            law.table,
            tokens,
            next_token,
            next_sibling,
            requests,
            accept_uniforms,
            verdict.accept_index,
            verdict.num_accepted_drafts,
            rejected_B,
            num_nodes,
            num_steps,
            config.max_len,
            config.threshold_single,
            max(config.threshold_acc, 1e-9),
        )
    _finish[(batch.size,)](
        law.table,
        workspace(law, batch.size),
        tokens,
        next_sibling,
        rejected_B,
        requests,
        final_uniforms,
        bonus_B,
        verdict.accept_index,
        verdict.num_accepted_drafts,
        verdict.num_accepted_tokens,
        verdict.predict,
        verdict.logprobs,
        num_nodes,
        num_steps,
        NODES=triton.next_power_of_2(max(num_nodes, num_steps + 1)),
        GROUP=GROUP,
        GROUPS=groups_block(law.logits.raw.shape[1]),
        PER=PER,
    )
    return verdict


def verify(
    batch: Batch,
    verify_input: VerifyInput,
    logits_RV: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None = None,
    acceptance: Schedule | None = None,
    allowed: Allowed | None = None,
    *,
    out: Verdict | None = None,
) -> Verdict:
    """How far the target, whose logits [B·N, V] these are, takes every tree.

    uniforms: the accept uniforms [B, S+1] and final uniforms [B] of this round, drawn by their names in the kernels
    where not given. A padded request has no path, predict and accept_index -1 and logprobs 0, no accepted draft and,
    as every verdict, one token more than drafts. acceptance: where given it decides how far, and the target the bonus
    tokens only.
    allowed: what may follow every node.
    """
    logits = node_logits(batch, verify_input, logits_RV, config, pools, allowed)
    return walk(batch, verify_input, logits, uniforms, config, acceptance, out=out)


@kernel
def _first_tokens(
    laws,
    space,
    known_tokens_ptr,
    rows_ptr,
    temperature_ptr,
    seq_lens_ptr,
    seeds_ptr,
    request_ids_ptr,
    tokens_ptr,
    logprobs_ptr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    real = tl.load(rows_ptr + request) >= 0
    token = tl.load(known_tokens_ptr + request).to(tl.int32)
    if real & (token < 0) & (tl.load(temperature_ptr + request) == 0):
        token = only_token(laws, request)
    if real & (token < 0):
        seed, request_id = tl.load(seeds_ptr + request), tl.load(request_ids_ptr + request)
        root_len, zero = tl.load(seq_lens_ptr + request) - 1, tl.full((), 0, tl.int32)
        uniform, own = named_uniform(seed, request_id, PREFILL, root_len, zero, zero), request * tl.cdiv(laws[6], GROUP)
        token = draw(laws, request, None, uniform, (space[0] + own, space[1] + own), GROUP, GROUPS, PER)
    token = tl.where(real, token, -1)
    tl.store(tokens_ptr + request, token)
    tl.store(logprobs_ptr + request, logprob(laws, request, token, real))


def first_tokens(
    batch: Batch,
    known_tokens: torch.Tensor,
    logits_BV: torch.Tensor,
    pools: KVPool,
    allowed: Allowed | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token after each request's chunk: (i32 [B], logprobs f32 [B]); -1 and 0 for padded requests.

    known_tokens: i64 [B], what is known of them, -1 where the token is sampled. allowed: what it may be, a row each.
    """
    tokens_B = torch.empty(batch.size, dtype=torch.int32, device=logits_BV.device)
    logprobs_B = torch.empty(batch.size, dtype=torch.float32, device=logits_BV.device)
    law = laws(batch, adjust_logits(batch, logits_BV, pools, None, 0, allowed))
    _first_tokens[(batch.size,)](
        law.table,
        workspace(law, batch.size),
        known_tokens,
        batch.req_pool_indices,
        batch.sampling.temperature,
        batch.seq_lens,
        batch.seeds,
        batch.request_ids,
        tokens_B,
        logprobs_B,
        GROUP=GROUP,
        GROUPS=groups_block(logits_BV.shape[1]),
        PER=PER,
    )
    return tokens_B, logprobs_B
