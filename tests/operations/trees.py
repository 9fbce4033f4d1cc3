"""Trees of a batch from the parents of their nodes."""

import torch

from specsim.core.phases import VerifyInput
from specsim.reference.tree import links, visibility


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
