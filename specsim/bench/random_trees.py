"""Random trees, and logits under which parts of them are accepted."""

import torch

from specsim.core.phases import VerifyInput


def random_parents(requests: int, nodes: int, depth: int, generator: torch.Generator) -> list[list[int]]:
    """Draw the parents of each tree's nodes: any earlier node of less than that depth, -1 for the root."""
    trees = []
    for _ in range(requests):
        parents = [-1]
        depths = [0]
        for _ in range(1, nodes):
            above = [node for node, its_depth in enumerate(depths) if its_depth < depth]
            parents.append(above[int(torch.randint(len(above), (1,), generator=generator))])
            depths.append(depths[parents[-1]] + 1)
        trees.append(parents)
    return trees


def tree_input(
    parents: list[list[int]], seq_lens: torch.Tensor, draft_tokens: torch.Tensor, cache_locations: torch.Tensor
) -> VerifyInput:
    """Make the verify input of these trees, on the CPU; draft_tokens, cache_locations: [B, N]."""
    from specsim.reference.tree import depths_of, links, visibility

    all_links = [links(tree_parents) for tree_parents in parents]
    shape = draft_tokens.shape
    return VerifyInput(
        draft_tokens=draft_tokens.long(),
        parents=torch.tensor(parents),
        scores=torch.ones(shape),
        positions=(
            seq_lens.cpu()[:, None] + torch.tensor([depths_of(tree_parents) for tree_parents in parents])
        ).flatten(),
        mask=torch.stack([visibility(tree_parents) for tree_parents in parents]),
        retrieve_index=torch.arange(draft_tokens.numel()).view(shape),
        retrieve_next_token=torch.tensor([first for first, _ in all_links]),
        retrieve_next_sibling=torch.tensor([sibling for _, sibling in all_links]),
        cache_locations=cache_locations.flatten(),
        proposed_depth=torch.tensor([max(depths_of(tree_parents)) for tree_parents in parents], dtype=torch.int32),
    )


def agree_with(logits_RV: torch.Tensor, verify_input: VerifyInput, share: float, generator: torch.Generator) -> None:
    """Make the first child of a share of the nodes the likeliest token there, in place."""
    tokens = verify_input.draft_tokens.cpu()
    first = verify_input.retrieve_next_token.cpu()
    chosen = (first >= 0) & (torch.rand(first.shape, generator=generator) < share)
    rows = chosen.flatten().nonzero()[:, 0]
    wanted = tokens.gather(1, first.clamp(min=0)).flatten()[rows]
    rows = rows.to(logits_RV.device)
    wanted = wanted.to(logits_RV.device)
    logits_RV[rows, wanted] = logits_RV[rows].amax(dim=1) + 1
