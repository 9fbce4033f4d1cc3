"""The verify tree: parents, depths, masks, and the first-child / next-sibling arrays."""

from dataclasses import replace
from itertools import pairwise

import torch

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates, VerifyInput
from specsim.reference.drafting import select


class MalformedTree(ValueError):
    """A parent list that is no tree, with request and node."""


def parents_of(top_scores_index: list[int], parent_list: list[int], k: int, request: int = 0) -> list[int]:
    """Node index of each node's parent, -1 for the root; node j ≥ 1 is candidate top_scores_index[j-1].

    Candidate f is in block f // K of siblings; the parent of block 0 is the root, of block j candidate parent_list[j].
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
    """Parents of the static tree of sampled drafts: node 1 + (d-1)K + l is the one of depth d in lane l."""
    return [-1, *(max(0, node - k) for node in range(1, 1 + k * num_steps))]


def depths_of(parents: list[int]) -> list[int]:
    """Number of edges from the root to each node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def visibility(parents: list[int]) -> torch.Tensor:
    """Mask bool [N, N] with which a node sees the root, its ancestors and itself."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], start=1):
        mask[node] |= mask[parent]
    return mask


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """(first child, next sibling) of each node, siblings in ascending node index, -1 for none."""
    children = [[node for node, parent in enumerate(parents) if parent == this] for this in range(len(parents))]
    next_token = [own[0] if own else -1 for own in children]
    next_sibling = [-1] * len(parents)
    for own in children:
        for older, younger in pairwise(own):
            next_sibling[older] = younger
    return next_token, next_sibling


def build(
    candidates: Candidates,
    bonus_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    cache_locations: torch.Tensor,
    config: SpecConfig,
) -> VerifyInput:
    """Select the N-1 best candidates of each request, of sampled drafts all, and lay them out below its bonus token.

    cache_locations: i64 [B, N], slot of column L + j; a node at or beyond max_len loses its slot.
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


def full_mask(mask_BNN: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Mask in layout FULL: flat bool, request after request N rows of L + N columns, the prefix columns true."""
    rows = zip(mask_BNN, seq_lens.tolist(), strict=True)
    padded = [torch.nn.functional.pad(mask, (length, 0), value=True).flatten() for mask, length in rows]
    return torch.cat([mask_BNN[:0].flatten(), *padded])


def bitpacked_mask(mask_BNN: torch.Tensor) -> torch.Tensor:
    """Mask in layout QLEN_BITPACKED: bit c of a row's word is column c.

    uint8 [B, N] for N ≤ 8, int16 for N ≤ 16, int32 for N ≤ 32, beyond that int32 [B, N, ceil(N/32)]; signed words
    carry the bits.
    """
    num_nodes = mask_BNN.shape[-1]
    width = next((bits for bits in (8, 16, 32) if num_nodes <= bits), 32)
    padded = torch.nn.functional.pad(mask_BNN, (0, -num_nodes % width)).unflatten(-1, (-1, width))
    words = (padded.long() << torch.arange(width)).sum(-1)
    signed = words if width == 8 else words - (words >> (width - 1) << width)
    packed = signed.to({8: torch.uint8, 16: torch.int16, 32: torch.int32}[width])
    return packed[..., 0] if num_nodes <= 32 else packed
