"""The verify tree: the best candidates of a draft phase, below the root."""

from dataclasses import replace

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, ExplicitCandidates, VerifyInput
from specsim.reference.selection import select
from specsim.reference.tree_explicit import check_explicit, explicit_parents, select_explicit
from specsim.reference.tree_links import depths_of, links
from specsim.reference.tree_mask import visibility
from specsim.reference.tree_parents import lane_parents, parents_of


def build(
    candidates: Candidates | ExplicitCandidates,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    cache_locations: torch.Tensor,
    config: SpecConfig,
) -> VerifyInput:
    """Build each request's tree of its N-1 best candidates, or of all sampled drafts, below its bonus token.

    Explicit candidates may be fewer; the tree's last nodes are then dead. cache_locations: i64 [B, N], slot of column L
    + j. A node at or beyond max_len loses its slot.
    """
    if isinstance(candidates, ExplicitCandidates):
        return _build_explicit(candidates, bonus_tokens, seq_lens, cache_locations, config)
    num_nodes = config.num_draft_tokens
    top_scores_index = select(candidates.scores, num_nodes - 1)
    rows = zip(top_scores_index.tolist(), candidates.parent_list.tolist(), strict=True)
    parents = [
        lane_parents(config.topk, config.num_steps)
        if config.is_sampled
        else parents_of(chosen, parent_list, config.topk, request)
        for request, (chosen, parent_list) in enumerate(rows)
    ]
    tokens_BN = candidates.tokens.gather(1, top_scores_index)
    scores_BN = candidates.scores.gather(1, top_scores_index)
    made = _lay_out(parents, tokens_BN, scores_BN, (bonus_tokens, seq_lens, cache_locations), config)
    depth = torch.full((len(parents),), config.num_steps, dtype=torch.int32)
    shown = replace(candidates, draft_prob=None)
    return replace(made, candidates=shown, draft_prob=candidates.draft_prob, proposed_depth=depth)


def _build_explicit(
    candidates: ExplicitCandidates,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    cache_locations: torch.Tensor,
    config: SpecConfig,
) -> VerifyInput:
    """Build trees of candidates with explicit parents."""
    num_drafts = config.num_draft_tokens - 1
    tokens_BN = torch.zeros(len(bonus_tokens), num_drafts, dtype=torch.int64)
    scores_BN = torch.zeros(len(bonus_tokens), num_drafts)
    parents = []
    for request, alive in enumerate(candidates.num_alive.tolist()):
        own = candidates.parents[request, :alive].tolist()
        check_explicit(own, request)
        chosen = select_explicit(own, candidates.scores[request, :alive].tolist(), num_drafts)
        parents.append(explicit_parents(own, chosen, num_drafts + 1))
        tokens_BN[request, : len(chosen)] = candidates.tokens[request, chosen]
        scores_BN[request, : len(chosen)] = candidates.scores[request, chosen]
    made = _lay_out(parents, tokens_BN, scores_BN, (bonus_tokens, seq_lens, cache_locations), config)
    return replace(made, candidates=replace(candidates, draft_prob=None), draft_prob=candidates.draft_prob)


def _lay_out(
    parents: list[list[int]],
    tokens_BN: torch.Tensor,
    scores_BN: torch.Tensor,
    roots: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    config: SpecConfig,
) -> VerifyInput:
    """Lay out trees from their nodes' parents, and the tokens and scores of their drafts.

    roots: bonus tokens [B], seq_lens [B] and slots [B, N].
    """
    bonus_tokens, seq_lens, cache_locations = roots
    num_nodes = config.num_draft_tokens
    depths = _table([depths_of(own) for own in parents], num_nodes)
    parents_BN = _table(parents, num_nodes)
    is_dead_BN = (parents_BN < 0) & (torch.arange(num_nodes) > 0)
    positions_BN = torch.where(is_dead_BN, 0, seq_lens[:, None] + depths)
    has_slot_BN = ~is_dead_BN & (positions_BN < config.length_limit)
    root_score = 1.0 if config.score == "prob" else 0.0
    all_links = [links(own) for own in parents]
    return VerifyInput(
        draft_tokens=torch.cat([bonus_tokens[:, None].long(), tokens_BN], dim=1),
        parents=parents_BN,
        scores=torch.nn.functional.pad(scores_BN, (1, 0), value=root_score),
        positions=positions_BN.flatten(),
        mask=torch.stack([visibility(own) for own in parents])
        if parents
        else torch.empty(0, num_nodes, num_nodes, dtype=torch.bool),
        retrieve_index=torch.arange(len(parents) * num_nodes).view(-1, num_nodes),
        retrieve_next_token=_table([first for first, _ in all_links], num_nodes),
        retrieve_next_sibling=_table([sibling for _, sibling in all_links], num_nodes),
        cache_locations=torch.where(has_slot_BN, cache_locations, -1).flatten(),
        proposed_depth=depths.amax(1).int(),
    )


def _table(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)
