"""Verification of every tree of a batch: all nodes' distributions at once, then one program for each request."""

from typing import no_type_check

import torch
import triton.language as tl

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.pool import KVPool
from specsim.core.rule import AcceptanceRule
from specsim.fast.acceptance import accept, finish
from specsim.fast.runtime.launch import await_input, kernel
from specsim.fast.runtime.uniforms import PREFILL
from specsim.fast.sampling import distributions
from specsim.fast.synthetic import SyntheticSchedule, follow
from specsim.fast.verifiers import rule
from specsim.fast.vocabulary.distribution import (
    PER,
    Requests,
    Workspace,
    draw,
    groups_block,
    logprob,
    only_token,
    uniform_of,
)
from specsim.fast.vocabulary.penalties import Allowed, Logits, TreePaths, adjust_logits
from specsim.fast.vocabulary.summaries import GROUP


def node_logits(
    batch: Batch,
    verify_input: VerifyInput,
    logits_RV: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    allowed: Allowed | None = None,
) -> Logits:
    """Compute every node's logits after penalties, bias and mask.

    Penalties `exact` count a node's path, `relaxed` only the root.
    """
    levels = config.num_steps + 1 if config.penalties == "exact" else 1
    tree = TreePaths(verify_input.draft_tokens, verify_input.parents)
    return adjust_logits(batch, logits_RV, pools, tree, levels, allowed)


def empty_verdict(batch_size: int, config: SpecConfig, device: torch.device) -> Verdict:
    """Allocate a verdict."""

    def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    width = config.num_steps + 1
    return Verdict(
        predict=table(batch_size * config.num_draft_tokens),
        accept_index=table(batch_size, width),
        num_accepted_drafts=table(batch_size),
        num_accepted_tokens=table(batch_size),
        logprobs=table(batch_size, width, dtype=torch.float32),
    )


def walk(
    batch: Batch,
    verify_input: VerifyInput,
    logits: Logits,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    acceptance: SyntheticSchedule | AcceptanceRule | None = None,
    *,
    out: Verdict | None = None,
) -> Verdict:
    """Verify every tree with the setting's verifier.

    Greedy requests have one-token distributions.

    logits: of every node, from node_logits. uniforms, acceptance: see `verify`.
    """
    node_distributions = distributions(batch, logits)
    device = node_distributions.moments.device
    _, final_uniforms = uniforms or (None, None)
    verdict = out or empty_verdict(batch.size, config, device)
    rejected_B = torch.empty_like(batch.seq_lens)
    bonus_B = None
    if isinstance(acceptance, AcceptanceRule):
        bonus_B = rule.accept(batch, verify_input, node_distributions, uniforms, config, acceptance, verdict)
    elif acceptance is not None:
        follow(batch, verify_input, acceptance, config, verdict, rejected_B)
    else:
        bonus_B = accept(batch, verify_input, node_distributions, uniforms, config, verdict, rejected_B)
    finish(batch, verify_input, node_distributions, final_uniforms, bonus_B, config, verdict, rejected_B)
    return verdict


def verify(
    batch: Batch,
    verify_input: VerifyInput,
    logits_RV: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None = None,
    acceptance: SyntheticSchedule | AcceptanceRule | None = None,
    allowed: Allowed | None = None,
    *,
    out: Verdict | None = None,
) -> Verdict:
    """Verify every tree with the target's logits, [B·N, V].

    uniforms: accept uniforms [B, S+1] and final uniforms [B] of this round, which the kernels draw by name if None.
    acceptance: a rule in place of the setting's verifier, which runs on the host, or a schedule that decides how many
    drafts are accepted, so that the target decides only the bonus tokens.
    allowed: tokens that may follow each node; None: all. A padded request has no path: its predict and accept_index are
    -1, its logprobs 0, and like every verdict it has one token more than accepted drafts.
    """
    logits = node_logits(batch, verify_input, logits_RV, config, pools, allowed)
    return walk(batch, verify_input, logits, uniforms, config, acceptance, out=out)


@kernel
@no_type_check
def _first_tokens_kernel(
    distributions,
    workspace,
    known_tokens_ptr,
    rows_ptr,
    requests,
    tokens_ptr,
    logprobs_ptr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    PER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the token after one request's chunk, and its logprob."""
    request = tl.program_id(0).to(tl.int64)
    await_input(PDL)
    real = tl.load(rows_ptr + request) >= 0
    token = tl.load(known_tokens_ptr + request).to(tl.int32)
    if real & (token < 0) & (tl.load(requests.temperature_ptr + request) == 0):
        token = only_token(distributions, request)
    if real & (token < 0):
        root_len = tl.load(requests.seq_lens_ptr + request) - 1
        uniform = uniform_of(requests, request, PREFILL, root_len, tl.full((), 0, tl.int32))
        token = draw(distributions, request, None, uniform, workspace, request, GROUP, GROUPS, PER)
    token = tl.where(real, token, -1)
    tl.store(tokens_ptr + request, token)
    tl.store(logprobs_ptr + request, logprob(distributions, request, token, real))


def first_tokens(
    batch: Batch,
    known_tokens: torch.Tensor,
    logits_BV: torch.Tensor,
    pools: KVPool,
    allowed: Allowed | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the token after each request's chunk: (i32 [B], logprobs f32 [B]), -1 and 0 for padded requests.

    known_tokens: i64 [B], -1 where the token is sampled. allowed: tokens that may follow, one row each; None: all.
    """
    tokens_B = torch.empty(batch.size, dtype=torch.int32, device=logits_BV.device)
    logprobs_B = torch.empty(batch.size, dtype=torch.float32, device=logits_BV.device)
    results = distributions(batch, adjust_logits(batch, logits_BV, pools, None, 0, allowed))
    _first_tokens_kernel[(batch.size,)](
        distributions=results.tables,
        workspace=Workspace.of(results, batch.size),
        known_tokens_ptr=known_tokens,
        rows_ptr=batch.req_pool_indices,
        requests=Requests.of(batch),
        tokens_ptr=tokens_B,
        logprobs_ptr=logprobs_B,
        GROUP=GROUP,
        GROUPS=groups_block(logits_BV.shape[1]),
        PER=PER,
    )
    return tokens_B, logprobs_B
