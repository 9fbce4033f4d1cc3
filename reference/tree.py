"""The verify tree: the candidates chosen for it, its parents, links and masks, and its walk by verification."""

from dataclasses import replace
from itertools import pairwise

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Batch, Candidates, ExplicitCandidates, VerifyInput
from specsim.core.rule import Tree
from specsim.reference.sampling import topk


def select(scores: torch.Tensor, count: int, num_alive: torch.Tensor | None = None) -> torch.Tensor:
    """Select the `count` best candidates, as ascending flat indices i64 [B, count].

    A parent scores no less than its child and precedes it. So with ties to the lower index the set is a tree.
    num_alive: i32 [B], the first num_alive candidates of a request go before all others; None: there are no others.
    """
    if num_alive is not None:
        is_alive = torch.arange(scores.shape[1]) < num_alive[:, None]
        scores = torch.where(is_alive, scores, -torch.inf)
    return topk(scores, count)[1].sort(dim=-1).values


def select_explicit(parents: list[int], scores: list[float], count: int, depth_limit: int) -> list[int]:
    """Select up to `count` of one request's candidates with their ancestors, as ascending indices.

    A candidate counts the lowest score on its path. The best of depth at most depth_limit are selected, ties to the
    lower index, so that the set is a tree.
    """
    path_scores: list[float] = []
    depths: list[int] = []
    for parent, score in zip(parents, scores, strict=True):
        path_scores.append(score if parent < 0 else min(score, path_scores[parent]))
        depths.append(1 if parent < 0 else depths[parent] + 1)
    allowed = [index for index, depth in enumerate(depths) if depth <= depth_limit]
    best_first = sorted(allowed, key=lambda index: (-path_scores[index], index))
    return sorted(best_first[:count])


class MalformedTree(ValueError):
    """A parent list that is no tree, reported with request and node."""


def parents_of(top_scores_index: list[int], parent_list: list[int], k: int, request: int = 0) -> list[int]:
    """Find each node's parent, -1 for the root, where node j ≥ 1 is candidate top_scores_index[j-1].

    Candidate f is in block f // K of siblings. The parent of block 0 is the root; that of block j is candidate
    parent_list[j].
    """
    node_of = {flat: node for node, flat in enumerate(top_scores_index, start=1)}
    if len(node_of) < len(top_scores_index):
        raise MalformedTree(f"request {request}: a candidate is selected twice in {top_scores_index}")
    parents = [-1]
    for node, flat in enumerate(top_scores_index, start=1):
        block = flat // k
        if not 0 <= block < len(parent_list):
            raise MalformedTree(
                f"request {request}, node {node}: candidate {flat} is outside the pool of {len(parent_list) * k}"
            )
        parent = 0 if block == 0 else node_of.get(parent_list[block], -1)
        if not 0 <= parent < node:
            raise MalformedTree(
                f"request {request}, node {node}: parent candidate {parent_list[block]} is not selected before it"
            )
        parents.append(parent)
    return parents


def lane_parents(k: int, num_steps: int) -> list[int]:
    """List the parents of the static tree of sampled drafts.

    Node 1 + (d-1)K + l is at depth d in lane l.
    """
    return [-1, *(max(0, node - k) for node in range(1, 1 + k * num_steps))]


def check_explicit(parents: list[int], request: int) -> None:
    """Raise MalformedTree for a candidate whose parent is neither the root nor an earlier candidate."""
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise MalformedTree(f"request {request}, candidate {index}: parent {parent} is not an earlier candidate")


def explicit_parents(parents: list[int], chosen: list[int], num_nodes: int) -> list[int]:
    """Find each node's parent, -1 for the root and for dead nodes, where node j ≥ 1 is candidate chosen[j-1].

    parents: of the candidates, index of an earlier candidate, -1 for the root.
    """
    node_of = {-1: 0} | {index: node for node, index in enumerate(chosen, start=1)}
    node_parents = [-1, *(node_of[parents[index]] for index in chosen)]
    return node_parents + [-1] * (num_nodes - len(node_parents))


def depths_of(parents: list[int]) -> list[int]:
    """Count the edges from the root to each node, 0 for a dead node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """Link each node to its (first child, next sibling), siblings in ascending node index, -1 for none."""
    children = [[node for node, parent in enumerate(parents) if parent == this] for this in range(len(parents))]
    next_token = [siblings[0] if siblings else -1 for siblings in children]
    next_sibling = [-1] * len(parents)
    for siblings in children:
        for older, younger in pairwise(siblings):
            next_sibling[older] = younger
    return next_token, next_sibling


def visibility(parents: list[int]) -> torch.Tensor:
    """Make the mask bool [N, N] in which a node sees the root, its ancestors and itself.

    A dead node sees nothing.
    """
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        mask[node] = mask[node] | mask[parent] if parent >= 0 else False
    return mask


def full_mask(mask_BNN: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Make the mask in layout FULL, flat bool.

    Each request has N rows of L + N columns; the prefix columns are true.
    """
    rows = zip(mask_BNN, seq_lens.tolist(), strict=True)
    padded = [torch.nn.functional.pad(mask, (length, 0), value=True).flatten() for mask, length in rows]
    return torch.cat([mask_BNN[:0].flatten(), *padded])


def bitpacked_mask(mask_BNN: torch.Tensor) -> torch.Tensor:
    """Make the mask in layout QLEN_BITPACKED: bit c of a row's word is column c.

    uint8 [B, N] for N ≤ 8, int16 for N ≤ 16, int32 for N ≤ 32, and int32 [B, N, ceil(N/32)] beyond. Bit patterns are
    stored in signed words.
    """
    num_nodes = mask_BNN.shape[-1]
    width = next((bits for bits in (8, 16, 32) if num_nodes <= bits), 32)
    padded = torch.nn.functional.pad(mask_BNN, (0, -num_nodes % width)).unflatten(-1, (-1, width))
    words = (padded.long() << torch.arange(width)).sum(-1)
    signed = words if width == 8 else words - (words >> (width - 1) << width)
    packed = signed.to({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width])
    return packed[..., 0] if num_nodes <= 32 else packed


def build(
    candidates: Candidates | ExplicitCandidates,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    cache_locations: torch.Tensor,
    config: SpecConfig,
    draft_steps: torch.Tensor | None = None,
    looked_up: ExplicitCandidates | None = None,
) -> VerifyInput:
    """Build each request's tree of its N-1 best candidates, or of all sampled drafts, below its bonus token.

    draft_steps: i32 [B], most depth of a node; None: num_steps. The tree is chosen among the candidates of that depth
    or less, as under a setting with those steps. Steps depend on no draft of the round and on no uniform that verifies
    it, so every verifier keeps its distribution. Where there are fewer candidates, the tree's last nodes are dead.
    cache_locations: i64 [B, N], slot of column L + j. A node at or beyond max_len loses its slot. looked_up: candidates
    in place of the others, for the requests that have some.
    """
    steps_B = torch.full((len(bonus_tokens),), config.num_steps) if draft_steps is None else draft_steps
    steps_B = steps_B.clamp(0, config.num_steps).int()
    if isinstance(candidates, ExplicitCandidates):
        chosen, parents = _chosen_explicit(candidates, steps_B, config)
    else:
        chosen, parents = _chosen(candidates, steps_B, config)
    tokens_BN = _entries(candidates.tokens, chosen, config.num_draft_tokens - 1)
    scores_BN = _entries(candidates.scores, chosen, config.num_draft_tokens - 1)
    tree = lay_out(parents, tokens_BN, scores_BN, (bonus_tokens, seq_lens, cache_locations), config)
    pool = replace(candidates, draft_prob=None)
    depth = tree.proposed_depth if isinstance(candidates, ExplicitCandidates) else steps_B
    tree = replace(tree, candidates=pool, draft_prob=candidates.draft_prob, proposed_depth=depth)
    if looked_up is None:
        return tree
    other = build(looked_up, bonus_tokens, seq_lens, cache_locations, config, draft_steps)
    return replace(_exchanged(tree, other, looked_up.num_alive > 0), looked_up=looked_up)


def _exchanged(tree: VerifyInput, other: VerifyInput, is_other_B: torch.Tensor) -> VerifyInput:
    """Take the trees of some requests from another value."""
    tensors = {}
    for name, value in tree.tensors.items():
        if name != "draft_prob":
            rows = is_other_B.repeat_interleave(len(value) // max(1, len(is_other_B)))
            tensors[name] = torch.where(rows.view(-1, *[1] * (value.dim() - 1)), getattr(other, name), value)
    return replace(tree, **tensors)


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
    return chosen, [request_parents + [-1] * (num_nodes - len(request_parents)) for request_parents in parents]


def _chosen_explicit(candidates: ExplicitCandidates, steps_B: torch.Tensor, config: SpecConfig) -> Chosen:
    """Choose the nodes of trees of candidates with explicit parents, and list their parents."""
    num_nodes = config.num_draft_tokens
    chosen = []
    parents = []
    for request, (alive, steps) in enumerate(zip(candidates.num_alive.tolist(), steps_B.tolist(), strict=True)):
        candidate_parents = candidates.parents[request, :alive].tolist()
        check_explicit(candidate_parents, request)
        scores = candidates.scores[request, :alive].tolist()
        chosen.append(select_explicit(candidate_parents, scores, num_nodes - 1, steps))
        parents.append(explicit_parents(candidate_parents, chosen[-1], num_nodes))
    return chosen, parents


def _entries(values_BM: torch.Tensor, chosen: list[list[int]], width: int) -> torch.Tensor:
    """Select entries of each request's candidates, and fill its row with 0."""
    entries = torch.zeros(len(chosen), width, dtype=values_BM.dtype)
    for request, indices in enumerate(chosen):
        entries[request, : len(indices)] = values_BM[request, indices]
    return entries


def lay_out(
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
    depths = _table([depths_of(tree_parents) for tree_parents in parents], num_nodes)
    parents_BN = _table(parents, num_nodes)
    is_dead_BN = (parents_BN < 0) & (torch.arange(num_nodes) > 0)
    positions_BN = torch.where(is_dead_BN, 0, seq_lens[:, None] + depths)
    has_slot_BN = ~is_dead_BN & (positions_BN < config.length_limit)
    root_score = 1.0 if config.score == "prob" else 0.0
    all_links = [links(tree_parents) for tree_parents in parents]
    return VerifyInput(
        draft_tokens=torch.cat([bonus_tokens[:, None].long(), tokens_BN], dim=1),
        parents=parents_BN,
        scores=torch.nn.functional.pad(scores_BN, (1, 0), value=root_score),
        positions=positions_BN.flatten(),
        mask=torch.stack([visibility(tree_parents) for tree_parents in parents])
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


def trees(batch: Batch, verify_input: VerifyInput, max_len: int) -> list[Tree]:
    """List every request's tree.

    No node at or beyond max_len may be accepted.
    """
    lists = zip(
        verify_input.draft_tokens.tolist(),
        verify_input.parents.tolist(),
        verify_input.retrieve_next_token.tolist(),
        verify_input.retrieve_next_sibling.tolist(),
        (max_len - 1 - batch.seq_lens).tolist(),
        strict=True,
    )
    return [Tree(*fields) for fields in lists]
