"""Batches, their trees from the parents of nodes, and the keys that their rows see."""

import torch

from specsim.core.config import SamplingParams
from specsim.core.phases import Batch, VerifyInput
from specsim.reference.attention import AttentionMetadata
from specsim.reference.tree import links, visibility


def make_batch(rows: list[int], lengths: list[int]) -> Batch:
    return Batch.of(range(len(rows)), rows, lengths, [SamplingParams()] * len(rows), vocab_size=3)


def seen(metadata: AttentionMetadata) -> list[list[tuple[int, int]]]:
    """List for every row the (slot, position) of its keys, sorted, with a key seen twice listed twice."""
    rows = [(keys, visible) for keys in metadata.keys for visible in keys.mask]
    return [
        sorted(zip(keys.slots[visible].tolist(), keys.positions[visible].tolist(), strict=True))
        for keys, visible in rows
    ]


def tree_batch(
    parents: list[list[int]],
    lengths: list[int],
    tokens: torch.Tensor | None = None,
    locations: torch.Tensor | None = None,
) -> VerifyInput:
    """Lay out one tree for each request, by default of tokens and slots in order."""
    size, num_nodes = len(parents), len(parents[0])
    rows_BN = torch.arange(size * num_nodes).view(size, num_nodes)
    mask_BNN = torch.stack([visibility(row) for row in parents])
    depths_BN = mask_BNN.sum(-1) - 1
    next_token_BN, next_sibling_BN = (torch.tensor(rows) for rows in zip(*map(links, parents), strict=True))
    return VerifyInput(
        draft_tokens=rows_BN % num_nodes if tokens is None else tokens, parents=torch.tensor(parents),
        scores=torch.ones(size, num_nodes), positions=(torch.tensor(lengths)[:, None] + depths_BN).flatten(),
        mask=mask_BNN, retrieve_index=rows_BN, retrieve_next_token=next_token_BN, retrieve_next_sibling=next_sibling_BN,
        cache_locations=rows_BN.flatten() if locations is None else locations,
        proposed_depth=depths_BN.amax(-1).int(),
    )  # fmt: skip
