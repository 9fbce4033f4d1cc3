"""The verify tree: the best candidates of a draft phase, below the root."""

from dataclasses import replace

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, VerifyInput
from specsim.reference.selection import select
from specsim.reference.tree_links import depths_of, links
from specsim.reference.tree_mask import visibility
from specsim.reference.tree_parents import lane_parents, parents_of


def build(
    candidates: Candidates,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    cache_locations: torch.Tensor,
    config: SpecConfig,
) -> VerifyInput:
    """Build each request's tree of its N-1 best candidates, or of all sampled drafts, below its bonus token.

    cache_locations: i64 [B, N], slot of column L + j. A node at or beyond max_len loses its slot.
    """
    num_nodes = config.num_draft_tokens
    top_scores_index = select(candidates.scores, num_nodes - 1)
    rows = zip(top_scores_index.tolist(), candidates.parent_list.tolist(), strict=True)
    parents = [
        lane_parents(config.topk, config.num_steps)
        if config.is_sampled
        else parents_of(chosen, parent_list, config.topk, request)
        for request, (chosen, parent_list) in enumerate(rows)
    ]
    positions_BN = seq_lens[:, None] + _table([depths_of(own) for own in parents], num_nodes)
    root_score = 1.0 if config.score == "prob" else 0.0
    all_links = [links(own) for own in parents]
    return VerifyInput(
        draft_tokens=torch.cat([bonus_tokens[:, None].long(), candidates.tokens.gather(1, top_scores_index)], dim=1),
        parents=_table(parents, num_nodes),
        scores=torch.nn.functional.pad(candidates.scores.gather(1, top_scores_index), (1, 0), value=root_score),
        positions=positions_BN.flatten(),
        mask=torch.stack([visibility(own) for own in parents])
        if parents
        else torch.empty(0, num_nodes, num_nodes, dtype=torch.bool),
        retrieve_index=torch.arange(len(parents) * num_nodes).view(-1, num_nodes),
        retrieve_next_token=_table([first for first, _ in all_links], num_nodes),
        retrieve_next_sibling=_table([sibling for _, sibling in all_links], num_nodes),
        cache_locations=torch.where(positions_BN < config.length_limit, cache_locations, -1).flatten(),
        candidates=replace(candidates, draft_prob=None),
        draft_prob=candidates.draft_prob,
    )


def _table(rows: list[list[int]], width: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int64).view(-1, width)
