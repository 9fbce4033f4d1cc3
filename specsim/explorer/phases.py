"""Phases of one request's round as JSON values: draft, tree, verify, commit, draft-extend."""

from typing import Any

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates
from specsim.core.pool import KVPool, lane_columns, tail_columns
from specsim.explorer.decisions import VerifierInput, bonus_origin, decide
from specsim.explorer.page_data import CandidateColumns, DepthDrafts, ExtendRows, NodeColumns
from specsim.explorer.recorder import RecordedStates
from specsim.explorer.round import Round
from specsim.explorer.tables import candidate_columns, lane_candidates, node_columns, target_probs

MOST_LIKELY = 4  # of the target's tokens after a node


def request_round(recorded_round: Round, row: int, other: str = "") -> dict[str, Any]:
    """Make the value of one request of a recorded round.

    other: names a rule or a schedule that decided in place of the setting's verifier.
    """
    states = recorded_round.states
    config = recorded_round.config
    is_greedy = float(states.batch.sampling.temperature[row]) == 0
    other = "" if is_greedy and other.startswith("rule ") else other  # a rule decides above temperature 0
    probs_NV = target_probs(states, config, row)
    candidates = candidate_columns(states, config, recorded_round.decode, row)
    nodes = node_columns(states, config, recorded_round.decode, row)
    has_probs = isinstance(states.verify_input.pool_of(row), Candidates)
    walk = VerifierInput.of(states, config, row, probs_NV, other)
    path = states.verify_output.verdict.accepted_path(row)
    num_nodes = len(nodes["node"])
    return {
        "length": int(states.batch.seq_lens[row]),
        "draft_kind": _draft_kind(recorded_round),
        "candidates": _candidates(candidates, config, has_probs),
        "lanes": lane_candidates(states, config, row),
        "nodes": _nodes(nodes, states, row, has_probs),
        "dead": states.verify_input.draft_tokens.shape[1] - num_nodes,
        "sees": [line.nonzero().flatten().tolist() for line in states.verify_input.mask[row, :num_nodes, :num_nodes]],
        "after": _after(candidates, nodes, walk, config, has_probs),
        "decided_by": walk.verifier,
        "decisions": [list(decision) for decision in decide(walk)],
        "path": path,
        "bonus": int(states.verify_output.verdict.accepted_tokens()[row][-1]),
        "bonus_origin": bonus_origin(walk, path),
        "kv": _kv(recorded_round, row, path),
        "extend": _extend(states, row),
    }


def _draft_kind(recorded_round: Round) -> str:
    """Name the way in which drafts were made, none without drafts."""
    candidates = recorded_round.states.verify_input.candidates
    has_none = candidates is None or (isinstance(candidates, Candidates) and candidates.tokens.shape[1] == 0)
    return "none" if has_none else recorded_round.draft_kind


def significant(value: float | None) -> float | None:
    """Round to four significant digits."""
    return None if value is None else float(f"{value:.4g}")


def _path_probs(scores: list[float], parents: list[int], root: float, config: SpecConfig) -> list[float | None]:
    """Compute the drafter's probability of each token after its parent from scores of paths."""
    above = torch.tensor([root if parent < 0 else scores[parent] for parent in parents], dtype=torch.float64)
    node_scores = torch.tensor(scores, dtype=torch.float64)
    probs = node_scores / above if config.score == "prob" else (node_scores - above).exp()
    return [significant(value) for value in probs.tolist()]


def _candidates(columns: dict[str, list[Any]], config: SpecConfig, has_probs: bool) -> CandidateColumns:
    root = 1.0 if config.score == "prob" else 0.0
    return {
        "steps": columns["step"],
        "parents": columns["parent"],
        "tokens": columns["token_id"],
        "scores": [significant(score) for score in columns["score"]],
        "probs": _path_probs(columns["score"], columns["parent"], root, config) if has_probs else [],
        "nodes": [-1 if node is None else node for node in columns["node"]],
    }


def _nodes(columns: dict[str, list[Any]], states: RecordedStates, row: int, has_probs: bool) -> NodeColumns:
    locations = states.verify_input.cache_locations.view_as(states.verify_input.draft_tokens)
    return {
        "parents": columns["parent"],
        "depths": columns["depth"],
        "tokens": columns["token_id"],
        "scores": [significant(score) for score in columns["score"]],
        "draft_probs": [significant(prob) if has_probs else None for prob in columns["draft_prob"]],
        "target_probs": [significant(prob) for prob in columns["target_prob"]],
        "uniforms": [significant(uniform) for uniform in columns["uniform"]],
        "slots": locations[row, : len(columns["node"])].tolist(),
    }


def _after(
    candidates: dict[str, list[Any]],
    nodes: dict[str, list[Any]],
    walk: VerifierInput,
    config: SpecConfig,
    has_probs: bool,
) -> list[list[list[Any]]]:
    """List tokens after each node, likeliest first: [token, target's probability, drafter's or null, child or -1].

    They are the children, the target's most likely tokens, and the drafter's best ones that are no nodes.
    """
    root = 1.0 if config.score == "prob" else 0.0
    probs = _path_probs(candidates["score"], candidates["parent"], root, config)
    proposed: dict[int, dict[int, float | None]] = {}  # by node, the drafter's probability of tokens after it
    node_of = {-1: 0} | {index: node for index, node in enumerate(candidates["node"]) if node is not None}
    for index, parent in enumerate(candidates["parent"]):
        if parent in node_of and has_probs:
            proposed.setdefault(node_of[parent], {}).setdefault(candidates["token_id"][index], probs[index])
    rows_after = []
    for node in nodes["node"]:
        children = [child for child in nodes["node"] if nodes["parent"][child] == node]  # siblings may be equal
        named = {nodes["token_id"][child] for child in children}
        likely = walk.probs_NV[node].topk(min(MOST_LIKELY, walk.probs_NV.shape[-1])).indices.tolist()
        proposed_tokens = proposed.get(node, {})
        others = [token for token in proposed_tokens if token not in named][:MOST_LIKELY]
        unnamed = [(token, -1) for token in dict.fromkeys([*likely, *others]) if token not in named]
        rows = []
        for token, child in [*((nodes["token_id"][child], child) for child in children), *unnamed]:
            drafted = proposed_tokens.get(token)
            if walk.draft_probs_MV is not None and node < len(walk.draft_probs_MV):
                drafted = significant(float(walk.draft_probs_MV[node, token]))
            rows.append([token, significant(float(walk.probs_NV[node, token])), drafted, child])
        rows_after.append(sorted(rows, key=lambda row: -(row[1] or 0)))
    return rows_after


def _kv(recorded_round: Round, row: int, path: list[int]) -> dict[str, Any]:
    """Describe the pages from the one with the first new column on, and the slots that the commit moves."""
    states = recorded_round.states
    config = recorded_round.config
    length = int(states.batch.seq_lens[row])
    table_row = int(states.batch.req_pool_indices[row])
    first = length // config.page_size
    begin = length + states.bonus_columns
    is_laned = recorded_round.draft_kind == "lanes" and states.drafted_pools.draft is not None
    num_forwards = max(0, min(config.num_steps - 1, config.length_limit - begin))
    locations = states.verify_input.cache_locations.view_as(states.verify_input.draft_tokens)[row].tolist()
    after = states.committed_pools.req_to_token[table_row].tolist()
    return {
        "first_page": first,
        "drafted_pages": _pages(states.drafted_pools, table_row, first),
        "committed_pages": _pages(states.committed_pools, table_row, first),
        "lanes": lane_columns(begin, config)[:, :num_forwards].tolist() if is_laned and num_forwards else [],
        "tails": tail_columns(begin, config)[1:].tolist() if is_laned and num_forwards else [],
        "moves": [[node, locations[node], after[length + depth]] for depth, node in enumerate(path)],
    }


def _pages(pools: KVPool, row: int, first: int) -> list[int]:
    slots = pools.req_to_token[row, first * pools.page_size :: pools.page_size]
    return (slots[slots >= 0] // pools.page_size).tolist()


def _extend(states: RecordedStates, row: int) -> ExtendRows:
    """Describe the rows of draft-extend, and the drafts that it leaves to the next round."""
    rows = states.verify_output.draft_extend_input
    low, high = rows.row_starts[row : row + 2].tolist()
    following: Any = states.next_draft_input
    levels: list[DepthDrafts] = []
    if hasattr(following, "topk_index"):  # it holds drafts
        shape = (-1, following.topk_index.shape[-1])
        drafts = zip(
            following.topk_index[row].reshape(shape).tolist(),
            following.topk_scores[row].reshape(shape).tolist(),
            strict=True,
        )
        levels = [{"tokens": tokens, "scores": [significant(score) for score in scores]} for tokens, scores in drafts]
    return {
        "tokens": rows.input_ids[low:high].tolist(),
        "positions": rows.positions[low:high].tolist(),
        "slots": rows.cache_locations[low:high].tolist(),
        "count": int(rows.num_accepted_tokens[row]),
        "next": levels,
    }
