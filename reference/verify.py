"""Verification of a batch (trees: arXiv 2305.09781): the accepted path of every tree, and the bonus token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.pool import KVPool
from specsim.core.rule import AcceptanceRule, Accepted, Tree
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.uniforms import first_uniforms, round_uniforms, token_noise
from specsim.core.verifiers import resolve
from specsim.reference.acceptance import greedy
from specsim.reference.sampling import adjust_logits, inverse_cdf, logprob, target_prob
from specsim.reference.synthetic import scheduled_drafts, scheduled_path
from specsim.reference.tree import trees


def node_logits(
    batch: Batch,
    verify_input: VerifyInput,
    logits_RV: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of every node after penalties, bias and mask, f64 [B, N, V].

    A node's context is the request's tokens and its own path; with penalties `relaxed` the request's tokens only.
    allowed: bool [B, N, V], None: all.
    """
    logits_BNV = logits_RV.unflatten(0, verify_input.draft_tokens.shape)
    adjusted_BNV = torch.empty_like(logits_BNV, dtype=torch.float64)
    every = trees(batch, verify_input, config.length_limit)
    for request, (tree, (row, length)) in enumerate(zip(every, batch.rows_and_lens, strict=True)):
        committed = pools.token_ids[row, :length]
        prompt_len = int(batch.prompt_lens[request])
        for node in range(len(tree.tokens)):
            path = tree.path_tokens(node if config.penalties == "exact" else 0)
            context = torch.cat([committed, torch.tensor(path)])
            allowed_V = None if allowed is None else allowed[request, node]
            adjusted_BNV[request, node] = adjust_logits(
                logits_BNV[request, node], context, prompt_len, batch.sampling, request, allowed_V
            )
    return adjusted_BNV


@dataclass(frozen=True, slots=True, eq=False)
class RoundDraws:
    """Random draws of one request's round."""

    uniforms: list[float]  # accept uniforms, by depth or by node
    final: float  # uniform of the bonus token
    noise_WV: torch.Tensor | None  # f64 [S+1, V] of the tokens after a round's nodes, by depth; None: not read


def round_draws(
    batch: Batch, config: SpecConfig, vocab_size: int, uniforms: tuple[torch.Tensor, torch.Tensor] | None = None
) -> list[RoundDraws]:
    """Draw what the setting's verifier reads of every request; uniforms: given ones."""
    names = batch.seeds, batch.request_ids, batch.seq_lens
    uniforms_BW, final_B = uniforms or round_uniforms(*names, config)
    noise: Sequence[torch.Tensor | None] = [None] * batch.size
    if config.verifier_kind.is_coupled:
        positions_BW = batch.seq_lens[:, None] + 1 + torch.arange(config.num_steps + 1)
        noise = list(token_noise(batch.seeds[:, None], batch.request_ids[:, None], positions_BW, vocab_size))
    return [RoundDraws(*draws) for draws in zip(uniforms_BW.tolist(), final_B.tolist(), noise, strict=True)]


def accepted(
    tree: Tree,
    prob_NV: torch.Tensor,
    draft_prob_MV: torch.Tensor | None,
    draws: RoundDraws,
    config: SpecConfig,
    rule: AcceptanceRule | None = None,
) -> Accepted:
    """Run the setting's verifier on one request's tree, or a rule in its place.

    draft_prob_MV: q by node, of nodes with children; None where the verifier reads none.
    """
    kind = config.verifier_kind
    draft_prob_NV = None
    if kind.reads_draft_prob:
        if draft_prob_MV is None:
            raise ValueError(f"the verify input has no draft_prob, which verifier {config.verifier} reads")
        num_leaves = len(prob_NV) - len(draft_prob_MV)
        draft_prob_NV = torch.nn.functional.pad(draft_prob_MV.double(), (0, 0, 0, num_leaves))
    if rule is not None:
        return rule.walk(tree, prob_NV, draft_prob_NV, draws.uniforms, draws.final)
    read = {
        "depth": (draws.uniforms, draws.final),
        "node": (draws.uniforms, draws.final),
        "noise": (draws.noise_WV,),
        "none": (draws.final,),
    }[kind.draws]
    distributions = (prob_NV, draft_prob_NV) if kind.reads_draft_prob else (prob_NV,)
    thresholds = (getattr(config, name) for name in kind.thresholds)
    return resolve(kind.reference)(tree, *distributions, *read, *thresholds)


def walk(
    batch: Batch,
    verify_input: VerifyInput,
    logits: torch.Tensor,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    acceptance: SyntheticAcceptance | AcceptanceRule | None = None,
) -> Verdict:
    """Verify every tree: greedily at temperature 0, else with the setting's verifier.

    logits: f64 [B, N, V] from node_logits. uniforms, acceptance: see `verify`.
    """
    size = batch.size
    num_nodes = config.num_draft_tokens
    width = config.num_steps + 1
    predict = torch.full((size * num_nodes,), -1, dtype=torch.int32)
    accept_index = torch.full((size, width), -1, dtype=torch.int32)
    logprobs = torch.zeros(size, width)
    num_accepted_drafts = torch.zeros(size, dtype=torch.int32)
    for request, (tree, (path, bonus)) in enumerate(_walks(batch, verify_input, logits, uniforms, config, acceptance)):
        num_accepted_drafts[request] = len(path) - 1
        tokens = [*(tree.tokens[node] for node in path[1:]), bonus]
        for step, (node, token) in enumerate(zip(path, tokens, strict=True)):
            predict[request * num_nodes + node] = token
            accept_index[request, step] = request * num_nodes + node
            logprobs[request, step] = logprob(logits[request, node], batch.sampling, request, token)
    return Verdict(predict, accept_index, num_accepted_drafts, num_accepted_drafts + 1, logprobs)


def _walks(
    batch: Batch,
    verify_input: VerifyInput,
    logits: torch.Tensor,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None,
    config: SpecConfig,
    acceptance: SyntheticAcceptance | AcceptanceRule | None,
) -> Iterator[tuple[Tree, Accepted]]:
    """Decide every request's path: by a schedule, else greedily at temperature 0, else by a rule or the verifier."""
    all_draws = round_draws(batch, config, logits.shape[-1], uniforms)
    num_drafts = scheduled_drafts(batch, acceptance) if isinstance(acceptance, SyntheticAcceptance) else []
    for request, tree in enumerate(trees(batch, verify_input, config.length_limit)):
        adjusted_NV = logits[request]
        draws = all_draws[request]
        if isinstance(acceptance, SyntheticAcceptance):
            path = scheduled_path(tree, num_drafts[request])
            bonus = inverse_cdf(target_prob(adjusted_NV[path[-1]], batch.sampling, request), draws.final)
            yield tree, Accepted(path, bonus)
        elif batch.sampling.temperature[request] == 0:
            yield tree, greedy(tree, adjusted_NV)
        else:
            prob_NV = torch.stack([target_prob(adjusted_V, batch.sampling, request) for adjusted_V in adjusted_NV])
            draft_prob_MV = None if verify_input.draft_prob is None else verify_input.draft_prob[request]
            yield tree, accepted(tree, prob_NV, draft_prob_MV, draws, config, acceptance)


def verify(
    batch: Batch,
    verify_input: VerifyInput,
    logits_RV: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    uniforms: tuple[torch.Tensor, torch.Tensor] | None = None,
    acceptance: SyntheticAcceptance | AcceptanceRule | None = None,
    allowed: torch.Tensor | None = None,
) -> Verdict:
    """Verify every tree with the target's logits, [B·N, V].

    uniforms: see core.uniforms.round_uniforms, which draws them if None. acceptance: a rule in place of the setting's
    verifier, or a schedule that decides how many drafts are accepted, so that the target decides only the bonus tokens.
    allowed: bool [B, N, V], tokens that may follow a node; None: all.
    """
    logits = node_logits(batch, verify_input, logits_RV, config, pools, allowed)
    return walk(batch, verify_input, logits, uniforms, config, acceptance)


def first_tokens(
    batch: Batch,
    known_tokens: torch.Tensor,
    logits_BV: torch.Tensor,
    pools: KVPool,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the token after each request's chunk: (i32 [B], logprobs f32 [B]).

    known_tokens: i64 [B], -1 where the token is sampled. allowed: bool [B, 1, V], tokens that may follow; None: all.
    """
    tokens = known_tokens.int().clone()
    logprobs = torch.zeros(batch.size)
    uniforms_B = first_uniforms(batch.seeds, batch.request_ids, batch.seq_lens)
    for request, (row, length) in enumerate(batch.rows_and_lens):
        context = pools.token_ids[row, :length]
        prompt_len = int(batch.prompt_lens[request])
        allowed_V = None if allowed is None else allowed[request, 0]
        adjusted_V = adjust_logits(logits_BV[request], context, prompt_len, batch.sampling, request, allowed_V)
        if tokens[request] < 0:
            tokens[request] = inverse_cdf(target_prob(adjusted_V, batch.sampling, request), float(uniforms_B[request]))
        logprobs[request] = logprob(adjusted_V, batch.sampling, request, int(tokens[request]))
    return tokens, logprobs
