"""Layout of a verify tree, from its parents: depths, first-child / next-sibling links, and masks for attention."""

from itertools import pairwise

import torch


def depths_of(parents: list[int]) -> list[int]:
    """Count the edges from the root to each node, 0 for a dead node."""
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """Link each node to its (first child, next sibling), siblings in ascending node index, -1 for none."""
    children = [[node for node, parent in enumerate(parents) if parent == this] for this in range(len(parents))]
    next_token = [own[0] if own else -1 for own in children]
    next_sibling = [-1] * len(parents)
    for own in children:
        for older, younger in pairwise(own):
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
