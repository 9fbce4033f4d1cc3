"""Pools of candidates, as a draft loop leaves them, for the cases that start from one."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Drafted:
    """A draft loop over B requests, K lanes and S steps.

    probs, ids: what the drafter proposed, [B, K] at the first step, then [B·K, K] of the lanes. tokens, scores: the
    candidates [B, K+(S-1)K²], step by step in `scores_by_step`; parent_list: [B, K(S-1)+1]; parents_by_step: [B, K+1]
    and then [B, K] each.
    """

    probs: list[torch.Tensor]
    ids: list[torch.Tensor]
    tokens_by_step: list[torch.Tensor]
    scores_by_step: list[torch.Tensor]
    parents_by_step: list[torch.Tensor]

    @property
    def tokens(self) -> torch.Tensor:
        return torch.cat(self.tokens_by_step, dim=1)

    @property
    def scores(self) -> torch.Tensor:
        return torch.cat([scores.flatten(1) for scores in self.scores_by_step], dim=1)

    @property
    def parent_list(self) -> torch.Tensor:
        return torch.cat([parents[:, :1] if len(self.probs) == 1 else parents for parents in self._parents], dim=1)

    @property
    def _parents(self) -> list[torch.Tensor]:
        return self.parents_by_step[:-1] or self.parents_by_step


def drafted(batch: int, k: int, num_steps: int, seed: int, coarse: bool = False) -> Drafted:
    """A loop with random proposals; coarse: of few distinct probabilities, so that many candidates tie.

    Ids are drawn from a wide range, so that a token says which candidate it is.
    """
    generator = torch.Generator().manual_seed(seed)
    made = Drafted([], [], [], [], [])
    lanes = torch.empty(0)
    for step in range(num_steps):
        rows = batch * k if step else batch
        made.probs.append(_proposals(rows, k, generator, coarse))
        made.ids.append(torch.randint(2**31 - 1, (rows, k), generator=generator))
        lanes = _advance(made, lanes, batch, k)
    return made


def _proposals(rows: int, k: int, generator: torch.Generator, coarse: bool) -> torch.Tensor:
    if coarse:
        prob_RK = 2.0 ** -torch.randint(1, 3, (rows, k), generator=generator)
    else:
        prob_RK = torch.rand(rows, k, generator=generator) / k
    return prob_RK.float().sort(dim=-1, descending=True).values


def _advance(made: Drafted, lanes_BK: torch.Tensor, batch: int, k: int) -> torch.Tensor:
    """Note a step's candidates; the scores of the next lanes."""
    from specsim.reference.drafting import child_scores, parent_ids, root_scores
    from specsim.reference.sampling import topk

    step, probs, ids = len(made.probs) - 1, made.probs[-1], made.ids[-1]
    if step == 0:
        scores_BK = root_scores(probs, "prob")
        made.scores_by_step.append(scores_BK[:, None])
        made.parents_by_step.append(torch.arange(-1, k).repeat(batch, 1))
    else:
        children_BKK = child_scores(lanes_BK, probs.view(batch, k, k), "prob")
        scores_BK, chosen_BK = topk(children_BKK.flatten(1), k)
        made.scores_by_step.append(children_BKK)
        made.parents_by_step.append(parent_ids(step, chosen_BK, k))
    made.tokens_by_step.append(ids.view(batch, k * k if step else k))
    return scores_BK


def chosen(made: Drafted, num_nodes: int) -> torch.Tensor:
    """The N-1 best candidates, [B, N-1]."""
    from specsim.reference.drafting import select

    return select(made.scores, num_nodes - 1)
