"""Candidates of a draft loop, as input of other cases."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DraftLoop:
    """A draft loop over B requests, K lanes and S steps."""

    probs: list[torch.Tensor]  # drafter's proposals, [B, K] at the first step, then [B·K, K]
    ids: list[torch.Tensor]  # their tokens
    tokens_by_step: list[torch.Tensor]  # candidates, [B, K] and then [B, K²]
    scores_by_step: list[torch.Tensor]  # [B, 1, K] and then [B, K, K]
    parents_by_step: list[torch.Tensor]  # [B, K+1] and then [B, K]

    @property
    def tokens(self) -> torch.Tensor:
        """All candidates [B, K+(S-1)K²]."""
        return torch.cat(self.tokens_by_step, dim=1)

    @property
    def scores(self) -> torch.Tensor:
        return torch.cat([scores.flatten(1) for scores in self.scores_by_step], dim=1)

    @property
    def parent_list(self) -> torch.Tensor:
        """Parents [B, K(S-1)+1]."""
        return torch.cat([parents[:, :1] if len(self.probs) == 1 else parents for parents in self._parents], dim=1)

    @property
    def _parents(self) -> list[torch.Tensor]:
        return self.parents_by_step[:-1] or self.parents_by_step


def drafted(batch: int, k: int, num_steps: int, seed: int, coarse: bool = False) -> DraftLoop:
    """Run a loop with random proposals; coarse: few distinct probabilities, so that many candidates tie.

    Ids are drawn from a wide range, so that a token identifies its candidate.
    """
    generator = torch.Generator().manual_seed(seed)
    draft_loop = DraftLoop([], [], [], [], [])
    lanes = torch.empty(0)
    for step in range(num_steps):
        rows = batch * k if step else batch
        draft_loop.probs.append(_proposals(rows, k, generator, coarse))
        draft_loop.ids.append(torch.randint(2**31 - 1, (rows, k), generator=generator))
        lanes = _advance(draft_loop, lanes, batch, k)
    return draft_loop


def _proposals(rows: int, k: int, generator: torch.Generator, coarse: bool) -> torch.Tensor:
    if coarse:
        prob_RK = 2.0 ** -torch.randint(1, 3, (rows, k), generator=generator)
    else:
        prob_RK = torch.rand(rows, k, generator=generator) / k
    return prob_RK.float().sort(dim=-1, descending=True).values


def _advance(draft_loop: DraftLoop, lanes_BK: torch.Tensor, batch: int, k: int) -> torch.Tensor:
    """Append a step's candidates; return the scores of the next lanes."""
    from specsim.reference.drafting import child_scores
    from specsim.reference.sampling import topk

    step = len(draft_loop.probs) - 1
    probs = draft_loop.probs[-1]
    ids = draft_loop.ids[-1]
    if step == 0:
        scores_BK = probs
        draft_loop.scores_by_step.append(scores_BK[:, None])
        draft_loop.parents_by_step.append(torch.arange(-1, k).repeat(batch, 1))
    else:
        children_BKK = child_scores(lanes_BK, probs.view(batch, k, k), "prob")
        scores_BK, chosen_BK = topk(children_BKK.flatten(1), k)
        draft_loop.scores_by_step.append(children_BKK)
        draft_loop.parents_by_step.append(draft_loop.tokens.shape[1] + chosen_BK)
    draft_loop.tokens_by_step.append(ids.view(batch, k * k if step else k))
    return scores_BK


def chosen(draft_loop: DraftLoop, num_nodes: int) -> torch.Tensor:
    """Select the indices [B, N-1] of the best candidates."""
    from specsim.reference.tree import select

    return select(draft_loop.scores, num_nodes - 1)
