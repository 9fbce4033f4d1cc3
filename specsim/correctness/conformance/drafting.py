"""Cases of the draft loop: top-k of a row, one step of the lanes, selection of the tree's nodes."""

from dataclasses import dataclass
from functools import partial

import torch

from specsim.correctness.conformance.contract import Call, KernelCase, arguments, replaced, strided


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


_NAN = float("nan")
_INF = float("inf")
_SPECIAL = {
    "ties go to the lower index": [
        [1, 3, 3, 2, 3, 0, 2],
        [2, 2, 2, 2, 2, 2, 2],
        [0.5, 0.25, 0.5, 0.25, 0.5, 0.25, 0.25],
    ],
    "minus infinity": [[-_INF, 1, -_INF, 0, -_INF, -_INF, 2], [-_INF] * 7],
    "NaN ranks above every number": [[1, _INF, 3, _NAN, 0, 2, 5], [_NAN, 4, _NAN, 4, _NAN, 1, 0]],
    "zeros of both signs are equal": [[-0.0, 0.0, -0.0, 0.0, -1, -2, -0.0]],
}


# The k largest


def topk_call(values: torch.Tensor, k: int) -> Call:
    """Make one call with these rows."""
    from specsim.reference.sampling import topk

    topk_p, topk_index = topk(values, k)
    return Call(arguments("draft_topk", values, k, -1), {"topk_p": topk_p, "topk_index": topk_index})


def _random_rows(rows: int, width: int, k: int) -> Call:
    return topk_call(torch.randn(rows, width, generator=torch.Generator().manual_seed(width)), k)


def _rows_with_gaps() -> Call:
    call = _random_rows(3, 37, 4)
    return replaced(call, values=strided(call.arguments["values"]))


_SHAPES = {
    "k 1": (3, 101, 1),
    "k 8 of 1031": (2, 1031, 8),
    "all of a row": (2, 5, 5),
    "one column": (4, 1, 1),
    "no rows": (0, 33, 4),
}

_TOPK = (
    *(KernelCase("draft_topk", name, partial(_random_rows, *shape)) for name, shape in _SHAPES.items()),
    *(
        KernelCase("draft_topk", name, partial(topk_call, torch.tensor(rows).float(), 4))
        for name, rows in _SPECIAL.items()
    ),
    KernelCase("draft_topk", "rows with gaps", _rows_with_gaps, may_refuse=True),
)


# One step


def step_call(draft_loop: DraftLoop, step: int, batch: int, k: int) -> Call:
    """Make step `step` of the loop: the drafter's proposals for the lanes of the step before."""
    hidden = torch.randn(batch * k if step else batch, 5, generator=torch.Generator().manual_seed(step))
    lanes = _lane_scores(draft_loop, step, k) if step else None
    expected = _next_lanes(draft_loop, step, hidden, k) if step else _root_lanes(draft_loop, hidden, k)
    return Call(arguments("expand", step, draft_loop.probs[step], draft_loop.ids[step], hidden, lanes, k), expected)


def _root_lanes(draft_loop: DraftLoop, hidden_BH: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    return {
        "input_ids": draft_loop.tokens_by_step[0].flatten(),
        "lane_hidden_states": hidden_BH.repeat_interleave(k, dim=0),
        "lane_scores": draft_loop.scores_by_step[0][:, 0],
        "tree_scores": draft_loop.scores_by_step[0],
        "tree_tokens": draft_loop.tokens_by_step[0],
        "tree_parents": draft_loop.parents_by_step[0],
    }


def _lane_scores(draft_loop: DraftLoop, step: int, k: int) -> torch.Tensor:
    """Compute the lanes' scores before a step: the best children of the step before it."""
    from specsim.reference.sampling import topk

    return topk(draft_loop.scores_by_step[step - 1].flatten(1), k)[0].contiguous()


def _next_lanes(draft_loop: DraftLoop, step: int, hidden_RH: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
    batch = len(draft_loop.tokens_by_step[0])
    chosen_BK = draft_loop.parents_by_step[step] - k - (step - 1) * k * k
    rows_BK = torch.arange(batch)[:, None] * k + chosen_BK // k
    return {
        "input_ids": draft_loop.tokens_by_step[step].gather(1, chosen_BK).flatten(),
        "lane_hidden_states": hidden_RH[rows_BK.flatten()],
        "lane_scores": _lane_scores(draft_loop, step + 1, k),
        "tree_scores": draft_loop.scores_by_step[step],
        "tree_tokens": draft_loop.tokens_by_step[step],
        "tree_parents": draft_loop.parents_by_step[step],
    }


def _step(batch: int, k: int, step: int, coarse: bool = False) -> Call:
    return step_call(drafted(batch, k, step + 1, seed=7, coarse=coarse), step, batch, k)


_EXPAND = (
    KernelCase("expand", "the first step", partial(_step, 3, 4, 0)),
    KernelCase("expand", "the second step", partial(_step, 3, 4, 1)),
    KernelCase("expand", "the fourth step", partial(_step, 2, 3, 3)),
    KernelCase("expand", "ten lanes", partial(_step, 2, 10, 2)),
    KernelCase("expand", "a chain", partial(_step, 5, 1, 2)),
    KernelCase("expand", "ties go to the lower index", partial(_step, 4, 4, 1, coarse=True)),
    KernelCase("expand", "no requests", partial(_step, 0, 4, 1)),
)


# The choice


def select_call(draft_loop: DraftLoop, num_nodes: int) -> Call:
    """Make a call that selects the nodes of a tree from the candidates of a loop."""
    picked = chosen(draft_loop, num_nodes)
    expected = {"top_scores_index": picked, "draft_tokens": draft_loop.tokens.gather(1, picked)}
    if len(draft_loop.probs) > 1:  # one step has no parents to name, and conventions differ
        expected["parent_list"] = draft_loop.parent_list
    lists = draft_loop.scores_by_step, draft_loop.tokens_by_step, draft_loop.parents_by_step
    return Call(arguments("select", *map(list, lists), num_nodes), expected)


def _select(batch: int, k: int, num_steps: int, num_nodes: int, coarse: bool = False) -> Call:
    return select_call(drafted(batch, k, num_steps, seed=3, coarse=coarse), num_nodes)


_SELECT = (
    KernelCase("select", "8 of 36", partial(_select, 3, 4, 3, 9)),
    KernelCase("select", "63 of 648", partial(_select, 2, 8, 11, 64)),
    KernelCase("select", "all of the pool", partial(_select, 2, 3, 2, 13)),
    KernelCase("select", "one step", partial(_select, 3, 5, 1, 4)),
    KernelCase("select", "a chain", partial(_select, 3, 1, 5, 6)),
    KernelCase("select", "ties go to the lower index", partial(_select, 5, 4, 3, 9, coarse=True)),
    KernelCase("select", "no requests", partial(_select, 0, 4, 3, 9)),
)

CASES = (*_TOPK, *_EXPAND, *_SELECT)
