"""Candidates and nodes of a recorded round as columns, for data frames and for the page of the explorer."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, ExplicitCandidates
from specsim.core.uniforms import round_uniforms
from specsim.explorer.recorder import RecordedStates

if TYPE_CHECKING:
    from specsim.plots.sheet import Decode


def candidate_columns(states: RecordedStates, config: SpecConfig, decode: "Decode", row: int) -> dict[str, list[Any]]:
    """Make the columns of Round.drafts."""
    candidates = states.verify_input.pool_of(row)
    if candidates is None:
        return {name: [] for name in ("step", "parent", "token_id", "text", "score", "node")}
    parents, chosen = _chosen(candidates, config, row)
    tokens = candidates.tokens[row, : len(parents)].tolist()
    steps: list[int] = []
    for parent in parents:
        steps.append(1 if parent < 0 else steps[parent] + 1)
    nodes = {candidate: node for node, candidate in enumerate(chosen, start=1)}
    return {
        "step": steps,
        "parent": parents,
        "token_id": tokens,
        "text": [decode([token]) for token in tokens],
        "score": candidates.scores[row, : len(parents)].tolist(),
        "node": [nodes.get(candidate) for candidate in range(len(tokens))],
    }


def _chosen(candidates: Candidates | ExplicitCandidates, config: SpecConfig, row: int) -> tuple[list[int], list[int]]:
    """Find the parent of each candidate, -1 for the root, and the candidates that became nodes."""
    from specsim.reference.tree import select, select_explicit

    count = config.num_draft_tokens - 1
    if isinstance(candidates, ExplicitCandidates):
        alive = int(candidates.num_alive[row])
        parents = candidates.parents[row, :alive].tolist()
        return parents, select_explicit(parents, candidates.scores[row, :alive].tolist(), count, config.num_steps)
    topk = config.topk
    siblings = 1 if config.is_sampled else topk
    blocks = candidates.parent_list[row].tolist()
    numbers = range(candidates.tokens.shape[1])
    parents = [-1 if number < topk else blocks[1 + (number - topk) // siblings] for number in numbers]
    return parents, select(candidates.scores, count)[row].tolist()


def lane_candidates(states: RecordedStates, config: SpecConfig, row: int) -> list[list[int]]:
    """List the candidates whose lanes the drafter ran, best lane first, for each step; none without lanes."""
    candidates = states.verify_input.pool_of(row)
    if not isinstance(candidates, Candidates):
        return []
    blocks = candidates.parent_list[row, 1:].tolist()
    return [blocks[first : first + config.topk] for first in range(0, len(blocks), config.topk)]


def node_columns(states: RecordedStates, config: SpecConfig, decode: "Decode", row: int) -> dict[str, list[Any]]:
    """Make the columns of Round.verify."""
    from specsim.reference.sampling import argmax
    from specsim.reference.tree import depths_of

    parents = states.verify_input.live_parents(row)
    tokens = states.verify_input.draft_tokens[row, : len(parents)].tolist()
    depths = depths_of(parents)
    probs_NV = target_probs(states, config, row)
    following = argmax(probs_NV[: len(parents)]).tolist()
    path = states.verify_output.verdict.accepted_path(row)
    below_root = list(zip(parents, tokens, strict=True))[1:]
    scores = states.verify_input.scores[row, : len(parents)].double()
    ratios = scores / scores[parents] if config.score == "prob" else (scores - scores[parents]).exp()
    return {
        "node": list(range(len(parents))),
        "parent": parents,
        "depth": depths,
        "token_id": tokens,
        "text": [decode([token]) for token in tokens],
        "score": scores.tolist(),
        "draft_prob": [None, *ratios[1:].tolist()],
        "target_prob": [None, *(float(probs_NV[parent, token]) for parent, token in below_root)],
        "uniform": node_uniforms(states, config, row, depths),
        "accepted": [node in path for node in range(len(parents))],
        "next_token_id": following,
        "next_text": [decode([token]) for token in following],
    }


def target_probs(states: RecordedStates, config: SpecConfig, row: int) -> torch.Tensor:
    """Compute the target's distribution after each node, f64 [N, V]."""
    from specsim.reference.sampling import target_prob
    from specsim.reference.verify import node_logits

    this_row = slice(row, row + 1)
    batch = states.batch.filter(torch.tensor([row]))
    trees = states.verify_input
    tree = replace(
        trees,
        draft_tokens=trees.draft_tokens[this_row],
        parents=trees.parents[this_row],
        retrieve_next_token=trees.retrieve_next_token[this_row],
        retrieve_next_sibling=trees.retrieve_next_sibling[this_row],
    )
    num_nodes = trees.draft_tokens.shape[1]
    logits_NV = states.verify_output.target_logits[row * num_nodes : (row + 1) * num_nodes]
    allowed = states.allowed if states.allowed is None else states.allowed[this_row]
    (adjusted_NV,) = node_logits(batch, tree, logits_NV, config, states.committed_pools, allowed)
    if float(batch.sampling.temperature) == 0:
        return torch.softmax(adjusted_NV, dim=-1)
    return torch.stack([target_prob(adjusted_V, batch.sampling, 0) for adjusted_V in adjusted_NV])


def node_uniforms(states: RecordedStates, config: SpecConfig, row: int, depths: list[int]) -> list[float | None]:
    """Draw the uniform of each node below the root again, None where the verifier draws none."""
    batch = states.batch
    draws = config.verifier_kind.draws
    is_drawn = float(states.batch.sampling.temperature[row]) > 0
    if not is_drawn or draws not in ("depth", "node"):
        return [None] * len(depths)
    uniforms = round_uniforms(batch.seeds, batch.request_ids, batch.seq_lens, config)[0][row].tolist()
    if draws == "node":
        return [None, *uniforms[1 : len(depths)]]
    return [uniforms[depth - 1] if depth else None for depth in depths]
