"""Verification (trees: arXiv 2305.09781) of a batch: walk every tree as far as the target takes the drafts."""

import torch

from specsim.config import SpecConfig
from specsim.phases import Batch, Verdict, VerifyInput
from specsim.pool import KVPool
from specsim.reference.acceptance import Tree, greedy, target_only
from specsim.reference.sampling import adjust_logits, inverse_cdf, logprob, target_prob
from specsim.reference.synthetic import scheduled_drafts
from specsim.synthetic import SyntheticAcceptance
from specsim.uniforms import accept_coins, final_coins, first_coins


def trees(batch: Batch, verify_input: VerifyInput, max_len: int) -> list[Tree]:
    """Every request's tree; no node at or beyond max_len may be accepted."""
    columns = (
        verify_input.draft_tokens,
        verify_input.parents,
        verify_input.retrieve_next_token,
        verify_input.retrieve_next_sibling,
    )
    limits = (max_len - 1 - batch.seq_lens).tolist()
    return [Tree(*row) for row in zip(*(column.tolist() for column in columns), limits, strict=True)]


def node_logits(
    batch: Batch,
    trees: list[Tree],
    logits_BNV: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    allowed_BNV: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every node's logits after penalties, bias and mask, f64 [B, N, V]; a node's context is the request's tokens and
    its own path.

    Penalties `relaxed` count the request's tokens only, whatever the path.
    """
    adjusted_BNV = torch.empty_like(logits_BNV, dtype=torch.float64)
    for request, (tree, (row, length)) in enumerate(zip(trees, batch.rows_and_lens, strict=True)):
        committed, prompt_len = pools.token_ids[row, :length], int(batch.prompt_lens[request])
        for node in range(len(tree.tokens)):
            path = tree.path_tokens(node if config.penalties == "exact" else 0)
            context = torch.cat([committed, torch.tensor(path)])
            allowed = None if allowed_BNV is None else allowed_BNV[request, node]
            adjusted_BNV[request, node] = adjust_logits(
                logits_BNV[request, node], context, prompt_len, batch.sampling, request, allowed
            )
    return adjusted_BNV


def follow(tree: Tree, num_drafts: int) -> list[int]:
    """Accept that many drafts whatever the target says: the path to the first node of that depth, or of the deepest."""
    limit = max(0, min(num_drafts, tree.depth_limit))
    paths = [tree.path(node) for node in range(len(tree.tokens))]
    return max((path for path in paths if len(path) <= limit + 1), key=len)


def walk(
    batch: Batch,
    trees: list[Tree],
    adjusted_BNV: torch.Tensor,
    coins_BW: torch.Tensor,
    final_coins_B: torch.Tensor,
    config: SpecConfig,
    num_drafts: list[int] | None = None,
) -> Verdict:
    """Walk every tree: greedily where the temperature is 0, else by target-only sampling.

    coins_BW: one coin a depth 0..S; final_coins_B: the coin of the bonus token. num_drafts: how many drafts each
    request accepts where a schedule decides that.
    """
    num_nodes, width = config.num_draft_tokens, config.num_steps + 1
    predict = torch.full((batch.size * num_nodes,), -1, dtype=torch.int32)
    accept_index = torch.full((batch.size, width), -1, dtype=torch.int32)
    logprobs = torch.zeros(batch.size, width)
    num_accepted_drafts = torch.zeros(batch.size, dtype=torch.int32)
    for request, tree in enumerate(trees):
        adjusted_NV = adjusted_BNV[request]
        final = float(final_coins_B[request])
        if num_drafts is not None:
            path = follow(tree, num_drafts[request])
            bonus = inverse_cdf(target_prob(adjusted_NV[path[-1]], batch.sampling, request), final)
        elif batch.sampling.temperature[request] == 0:
            path, bonus = greedy(tree, adjusted_NV)
        else:
            prob_NV = torch.stack([target_prob(adjusted_V, batch.sampling, request) for adjusted_V in adjusted_NV])
            coins = coins_BW[request].tolist()
            path, bonus = target_only(tree, prob_NV, coins, final, config.threshold_single, config.threshold_acc)
        num_accepted_drafts[request] = len(path) - 1
        for step, (node, token) in enumerate(
            zip(path, [*(tree.tokens[node] for node in path[1:]), bonus], strict=True)
        ):
            predict[request * num_nodes + node] = token
            accept_index[request, step] = request * num_nodes + node
            logprobs[request, step] = logprob(adjusted_NV[node], batch.sampling, request, token)
    return Verdict(predict, accept_index, num_accepted_drafts, num_accepted_drafts + 1, logprobs)


def verify(
    batch: Batch,
    verify_input: VerifyInput,
    logits_RV: torch.Tensor,
    config: SpecConfig,
    pools: KVPool,
    coins: tuple[torch.Tensor, torch.Tensor] | None = None,
    acceptance: SyntheticAcceptance | None = None,
) -> Verdict:
    """How far the target, whose logits [B·N, V] these are, takes every tree.

    coins: the accept coins [B, S+1] and final coins [B] of this round, drawn by their names where not given.
    acceptance: where given it decides how far, and the target the bonus tokens only.
    """
    names = batch.seeds, batch.request_ids, batch.seq_lens
    coins_BW, final_coins_B = coins or (accept_coins(*names, config.num_steps), final_coins(*names))
    grown = trees(batch, verify_input, config.max_len)
    logits_BNV = logits_RV.unflatten(0, verify_input.draft_tokens.shape)
    adjusted_BNV = node_logits(batch, grown, logits_BNV, config, pools)
    num_drafts = None if acceptance is None else scheduled_drafts(batch, acceptance)
    return walk(batch, grown, adjusted_BNV, coins_BW, final_coins_B, config, num_drafts)


def first_tokens(
    batch: Batch, known_tokens: torch.Tensor, logits_BV: torch.Tensor, pools: KVPool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The token after each request's chunk: (i32 [B], logprobs f32 [B]).

    known_tokens: i64 [B], what is known of them, -1 where the token is sampled.
    """
    tokens, logprobs = known_tokens.int().clone(), torch.zeros(batch.size)
    coins_B = first_coins(batch.seeds, batch.request_ids, batch.seq_lens)
    for request, (row, length) in enumerate(batch.rows_and_lens):
        context, prompt_len = pools.token_ids[row, :length], int(batch.prompt_lens[request])
        adjusted_V = adjust_logits(logits_BV[request], context, prompt_len, batch.sampling, request)
        if tokens[request] < 0:
            tokens[request] = inverse_cdf(target_prob(adjusted_V, batch.sampling, request), float(coins_B[request]))
        logprobs[request] = logprob(adjusted_V, batch.sampling, request, int(tokens[request]))
    return tokens, logprobs
