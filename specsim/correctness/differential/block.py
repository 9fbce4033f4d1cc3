"""Comparison of a block drafter's candidates: depth by depth, each ranked or drawn by the logits of its slot."""

from dataclasses import dataclass

import torch

from specsim.core.block import BlockConfig
from specsim.core.phases import ExplicitCandidates, VerifyInput
from specsim.correctness.differential.comparison import Trio, log_prob_budget, present
from specsim.correctness.differential.ranking import (
    DraftRow,
    LogitsPair,
    candidates_of,
    compare_drafts,
    compare_draws,
    log_scores,
    require_falling,
)
from specsim.correctness.differential.step import ComparedRequest

TOKENS = "candidates.tokens"
SCORES = "candidates.scores"
PARENTS = "candidates.parents"
BlockCandidates = ComparedRequest[ExplicitCandidates]


@dataclass(frozen=True, slots=True)
class BlockLevel:
    """Entries of one depth, which are the children of its lanes in order."""

    depth: int
    entries: slice
    num_lanes: int

    def rows(self, values: Trio[torch.Tensor]) -> Trio[torch.Tensor]:
        """Select the level's entries, one row for each lane."""
        return values.map(lambda entries: entries[self.entries].view(self.num_lanes, -1))


def compare_slots(request: ComparedRequest[VerifyInput]) -> bool:
    """Compare the candidates of every depth that max_len allows, and how many of them exist.

    The lanes of a depth, and the number of candidates, have to follow exactly from the implementation's own scores and
    confidences.
    """
    candidates = candidates_of(request, ExplicitCandidates)
    config = request.config
    limit = min(config.num_steps, max(0, config.length_limit - 1 - request.length))
    noise_of_lanes = torch.zeros(1, dtype=torch.float64)
    first = 0
    previous: BlockLevel | None = None
    for depth, size in enumerate(config.level_sizes[:limit]):
        num_lanes = len(candidates.states.reference.draft_logits[depth][candidates.index])
        level = BlockLevel(depth, slice(first, first + size), num_lanes)
        chosen = _compare_lanes(candidates, level, previous)
        if chosen is None:
            return False
        _compare_confidence(candidates, level)
        logits = LogitsPair(*(pool.draft_logits[depth][candidates.index] for pool in candidates.states[:2]))
        noise_of_lanes = noise_of_lanes[chosen]
        noise = _compare_children(request, candidates, level, logits)
        if noise is None:
            return False
        noise_of_lanes = (noise_of_lanes + noise).repeat_interleave(size // num_lanes)
        values = candidates.field("scores").map(lambda entries, at=level: log_scores(entries[at.entries], config.score))
        request.check.within(SCORES, values.exact, values.fast, float(noise_of_lanes.max()))
        previous = level
        first += size
    return _compare_alive(candidates, limit)


def _compare_lanes(candidates: BlockCandidates, level: BlockLevel, previous: BlockLevel | None) -> torch.Tensor | None:
    """Compare the parents of a level, and return their places among the entries of the level before.

    None where rounding decided them.
    """
    parents = level.rows(candidates.field("parents"))
    if previous is None:
        candidates.check.same(PARENTS, parents.reference, parents.fast)
        return torch.zeros(1, dtype=torch.int64)
    if candidates.config.is_sampled:
        best = torch.arange(level.num_lanes)
    else:
        scores = candidates.field("scores").fast[previous.entries]
        best = torch.sort(scores, descending=True, stable=True).indices[: level.num_lanes]
    expected = (previous.entries.start + best)[:, None].expand_as(parents.fast)
    candidates.check.same(PARENTS, expected, parents.fast)
    return best if candidates.check.decided(parents.map(lambda rows: rows[:, 0].tolist())) else None


def _compare_confidence(candidates: BlockCandidates, level: BlockLevel) -> None:
    confidence = candidates.field("confidence")
    if confidence.reference is not None:
        values = confidence.map(lambda entries: present("confidence", entries)[level.depth : level.depth + 1])
        candidates.check.close("candidates.confidence", values)


def _compare_children(
    request: ComparedRequest[VerifyInput], candidates: BlockCandidates, level: BlockLevel, logits: LogitsPair
) -> torch.Tensor | float | None:
    """Compare every lane's drafts, best ones or drawn ones.

    Returns the error of their log probabilities, None where rounding decided a draft.
    """
    config = request.config
    tokens = level.rows(candidates.field("tokens"))
    if not config.is_sampled:
        if not compare_drafts(candidates, TOKENS, tokens, logits):
            return None
        scores = candidates.field("scores").fast
        parents = level.rows(candidates.field("parents")).fast[:, 0]
        above = torch.where(parents < 0, 1.0 if config.score == "prob" else 0.0, scores[parents.clamp(min=0)])
        require_falling(SCORES, above, level.rows(candidates.field("scores")).fast, level.entries.start)
        return log_prob_budget(*logits, request.check.eps)
    noise = []
    draft_prob = request.field("draft_prob")
    for lane in range(level.num_lanes):
        node = 1 + (level.depth - 1) * config.topk + lane if level.depth else 0
        row = DraftRow(
            name=TOKENS,
            tokens=tokens.map(lambda rows, i=lane: rows[i]),
            draft_prob=draft_prob.map(lambda prob_MV, at=node: None if prob_MV is None else prob_MV[at]),
            logits=LogitsPair(*(logits_RV[lane, None] for logits_RV in logits)),
            root_len=request.length,
            depth=level.depth,
            lanes=range(lane, lane + 1) if level.depth else range(config.topk),
        )
        if not compare_draws(request, row):
            return None
        noise.append(row.logits.log_noise(request))
    return torch.tensor(noise, dtype=torch.float64)


def _compare_alive(candidates: BlockCandidates, limit: int) -> bool:
    """Require the number of candidates that follows from the implementation's own confidences."""
    drafter = candidates.step.implementations.reference.engine.drafter
    block: BlockConfig = drafter.block
    depth = limit
    confidence = candidates.field("confidence")
    if block.cuts:
        is_high = torch.sigmoid(present("confidence", confidence.fast).double()) >= block.threshold
        depth = min(depth, int(is_high.long().cumprod(0).sum()))
    alive = candidates.field("num_alive").map(int)
    check = candidates.check
    expected = sum(candidates.config.level_sizes[:depth])
    check.require("candidates.num_alive", alive.fast == expected, depth, alive.fast)
    check.tally.coverage["drafts"] += alive.fast
    check.tally.coverage["rounds without drafts"] += alive.fast == 0
    check.tally.coverage["blocks cut"] += depth < limit
    return check.decided(alive)
