"""Verification of a batch (trees: arXiv 2305.09781): the accepted path of every tree, and the bonus token."""

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Verdict, VerifyInput
from specsim.core.pool import KVPool
from specsim.core.rule import AcceptanceRule, Accepted, Tree
from specsim.core.synthetic_acceptance import SyntheticAcceptance
from specsim.core.uniforms import accept_uniforms, final_uniforms, first_uniforms, gumbel_noise, lane_accept_uniforms
from specsim.reference import acceptance as accept
from specsim.reference.request_tree import trees
from specsim.reference.sampling import adjust_logits, inverse_cdf, logprob, target_prob
from specsim.reference.synthetic import scheduled_drafts, scheduled_path


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


def accepted(
    tree: Tree,
    prob_NV: torch.Tensor,
    draft_prob_MV: torch.Tensor | None,
    uniforms: tuple[torch.Tensor, float, torch.Tensor | None],
    config: SpecConfig,
    rule: AcceptanceRule | None = None,
) -> Accepted:
    """Run the setting's verifier on one request's tree, or a rule in its place.

    draft_prob_MV: q by node, of nodes with children. uniforms: accept uniforms, final uniform, Gumbel noise.
    """
    accept_uniforms_W, final, noise_WV = uniforms
    if noise_WV is not None:
        return accept.gumbel(tree, prob_NV, noise_WV)
    if config.verifier == "typical":
        return accept.typical(tree, prob_NV, config.typical_epsilon, config.typical_delta, final)
    accept_list = accept_uniforms_W.tolist()
    if config.verifier == "target_only":
        if rule is not None:
            return rule.walk(tree, prob_NV, None, accept_list, final)
        return accept.target_only(tree, prob_NV, accept_list, final, config.threshold_single, config.threshold_acc)
    if draft_prob_MV is None:
        raise ValueError(f"the verify input has no draft_prob, which verifier {config.verifier} reads")
    num_leaves = len(prob_NV) - len(draft_prob_MV)
    draft_prob_NV = torch.nn.functional.pad(draft_prob_MV.double(), (0, 0, 0, num_leaves))
    walk_tree = getattr(accept, config.verifier) if rule is None else rule.walk
    return walk_tree(tree, prob_NV, draft_prob_NV, accept_list, final)


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
    uniforms_BW, final_uniforms_B = uniforms or round_uniforms(batch, config)
    noise_BWV = round_noise(batch, config, logits.shape[-1]) if config.verifier == "gumbel" else None
    rule = acceptance if isinstance(acceptance, AcceptanceRule) else None
    num_drafts = scheduled_drafts(batch, acceptance) if isinstance(acceptance, SyntheticAcceptance) else None
    num_nodes = config.num_draft_tokens
    width = config.num_steps + 1
    predict = torch.full((batch.size * num_nodes,), -1, dtype=torch.int32)
    accept_index = torch.full((batch.size, width), -1, dtype=torch.int32)
    logprobs = torch.zeros(batch.size, width)
    num_accepted_drafts = torch.zeros(batch.size, dtype=torch.int32)
    for request, tree in enumerate(trees(batch, verify_input, config.length_limit)):
        adjusted_NV = logits[request]
        final = float(final_uniforms_B[request])
        if num_drafts is not None:
            path = scheduled_path(tree, num_drafts[request])
            bonus = inverse_cdf(target_prob(adjusted_NV[path[-1]], batch.sampling, request), final)
        elif batch.sampling.temperature[request] == 0:
            path, bonus = accept.greedy(tree, adjusted_NV)
        else:
            prob_NV = torch.stack([target_prob(adjusted_V, batch.sampling, request) for adjusted_V in adjusted_NV])
            noise_WV = None if noise_BWV is None else noise_BWV[request]
            draft_prob_MV = None if verify_input.draft_prob is None else verify_input.draft_prob[request]
            drawn = (uniforms_BW[request], final, noise_WV)
            path, bonus = accepted(tree, prob_NV, draft_prob_MV, drawn, config, rule)
        num_accepted_drafts[request] = len(path) - 1
        tokens = [*(tree.tokens[node] for node in path[1:]), bonus]
        for step, (node, token) in enumerate(zip(path, tokens, strict=True)):
            predict[request * num_nodes + node] = token
            accept_index[request, step] = request * num_nodes + node
            logprobs[request, step] = logprob(adjusted_NV[node], batch.sampling, request, token)
    return Verdict(predict, accept_index, num_accepted_drafts, num_accepted_drafts + 1, logprobs)


def round_uniforms(batch: Batch, config: SpecConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the uniforms of a round: (accept [B, S+1] by depth, final [B]).

    For multi_round, accept is [B, N] by node.
    """
    names = batch.seeds, batch.request_ids, batch.seq_lens
    if config.verifier == "multi_round":
        return lane_accept_uniforms(*names, config.num_steps, config.topk), final_uniforms(*names)
    return accept_uniforms(*names, config.num_steps), final_uniforms(*names)


def round_noise(batch: Batch, config: SpecConfig, vocab_size: int) -> torch.Tensor:
    """Draw the Gumbel noise f64 [B, S+1, V] of the tokens that follow a round's nodes, by depth."""
    positions_BW = batch.seq_lens[:, None] + 1 + torch.arange(config.num_steps + 1)
    return gumbel_noise(batch.seeds[:, None], batch.request_ids[:, None], positions_BW, vocab_size)


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

    uniforms: from round_uniforms, which draws them if None. acceptance: a rule in place of the setting's verifier, or a
    schedule that decides how many drafts are accepted, so that the target decides only the bonus tokens. allowed: bool
    [B, N, V], tokens that may follow a node; None: all.
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
