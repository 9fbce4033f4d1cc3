"""The verify tree: the best candidates of a draft phase, below the root."""

from dataclasses import replace

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, ExplicitCandidates, VerifyInput
from specsim.reference.selection import select, select_explicit
from specsim.reference.tree_layout import depths_of, links, visibility
from specsim.reference.tree_nodes import check_explicit, explicit_parents, lane_parents, parents_of


def build(
    candidates: Candidates | ExplicitCandidates,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    cache_locations: torch.Tensor,
    config: SpecConfig,
    draft_steps: torch.Tensor | None = None,
) -> VerifyInput:
    """Build each request's tree of its N-1 best candidates, or of all sampled drafts, below its bonus token.

    draft_steps: i32 [B], most depth of a node; None: num_steps. The tree is chosen among the candidates of that depth
    or less, as under a setting with those steps. Steps depend on no draft of the round and on no uniform that verifies
    it, so every verifier keeps its distribution. Where there are fewer candidates, the tree's last nodes are dead.
    cache_locations: i64 [B, N], slot of column L + j. A node at or beyond max_len loses its slot.
    """
    steps_B = torch.full((len(bonus_tokens),), config.num_steps) if draft_steps is None else draft_steps
    steps_B = steps_B.clamp(0, config.num_steps).int()
    if isinstance(candidates, ExplicitCandidates):
        chosen, parents = _chosen_explicit(candidates, steps_B, config)
    else:
        chosen, parents = _chosen(candidates, steps_B, config)
    tokens_BN = _entries(candidates.tokens, chosen, config.num_draft_tokens - 1)
    scores_BN = _entries(candidates.scores, chosen, config.num_draft_tokens - 1)
    made = _lay_out(parents, tokens_BN, scores_BN, (bonus_tokens, seq_lens, cache_locations), config)
    shown = replace(candidates, draft_prob=None)
    depth = made.proposed_depth if isinstance(candidates, ExplicitCandidates) else steps_B
    return replace(made, candidates=shown, draft_prob=candidates.draft_prob, proposed_depth=depth)


Chosen = tuple[list[list[int]], list[list[int]]]  # of each request: candidates of its drafts, parents of its N nodes


def _chosen(candidates: Candidates, steps_B: torch.Tensor, config: SpecConfig) -> Chosen:
    """Choose the nodes of trees of lanes, and list their parents."""
    num_nodes = config.num_draft_tokens
    alive = [config.candidates_within(steps) for steps in steps_B.tolist()]
    index_BN = select(candidates.scores, num_nodes - 1, torch.tensor(alive, dtype=torch.int32))
    chosen = [[flat for flat in row if flat < count] for row, count in zip(index_BN.tolist(), alive, strict=True)]
    parents = [
        lane_parents(config.topk, steps) if config.is_sampled else parents_of(flat, parent_list, config.topk, request)
        for request, (flat, parent_list, steps) in enumerate(
            zip(chosen, candidates.parent_list.tolist(), steps_B.tolist(), strict=True)
        )
    ]
    return chosen, [own + [-1] * (num_nodes - len(own)) for own in parents]


def _chosen_explicit(candidates: ExplicitCandidates, steps_B: torch.Tensor, config: SpecConfig) -> Chosen:
    """Choose the nodes of trees of candidates with explicit parents, and list their parents."""
    num_nodes = config.num_draft_tokens
    chosen = []
    parents = []
    for request, (alive, steps) in enumerate(zip(candidates.num_alive.tolist(), steps_B.tolist(), strict=True)):
        own = candidates.parents[request, :alive].tolist()
        check_explicit(own, request)
        chosen.append(select_explicit(own, candidates.scores[request, :alive].tolist(), num_nodes - 1, steps))
        parents.append(explicit_parents(own, chosen[-1], num_nodes))
    return chosen, parents


def _entries(values_BM: torch.Tensor, chosen: list[list[int]], width: int) -> torch.Tensor:
    """Select entries of each request's candidates, and fill its row with 0."""
    made = torch.zeros(len(chosen), width, dtype=values_BM.dtype)
    for request, own in enumerate(chosen):
        made[request, : len(own)] = values_BM[request, own]
    return made


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
