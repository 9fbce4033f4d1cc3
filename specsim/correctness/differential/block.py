"""Comparison of a block drafter's candidates: depth by depth, each ranked or drawn by the logits of its slot."""

from dataclasses import dataclass

import torch

from specsim.core.block import BlockConfig
from specsim.core.phases import ExplicitCandidates, VerifyInput
from specsim.correctness.differential.budget import log_prob_budget
from specsim.correctness.differential.comparison import Mismatch, Trio, present
from specsim.correctness.differential.ranking import Logits, compare_drafts, log_scores
from specsim.correctness.differential.sampled import DrawnRow, compare_draws
from specsim.correctness.differential.step import ComparedRequest

TOKENS = "candidates.tokens"
SCORES = "candidates.scores"
PARENTS = "candidates.parents"
Found = ComparedRequest[ExplicitCandidates]


@dataclass(frozen=True, slots=True)
class Level:
    """Entries of one depth, which are the children of its lanes in order."""

    depth: int
    entries: slice
    num_lanes: int

    def rows(self, values: Trio[torch.Tensor]) -> Trio[torch.Tensor]:
        """Select the level's entries, one row for each lane."""
        return values.map(lambda own: own[self.entries].view(self.num_lanes, -1))


def compare_slots(request: ComparedRequest[VerifyInput]) -> None:
    """Compare the candidates of every depth that max_len allows, and how many of them exist.

    The lanes of a depth, and the number of candidates, have to follow exactly from the implementation's own scores and
    confidences.
    """
    found = request.of(request.states.map(lambda tree: _explicit(tree)))
    config = request.config
    limit = min(config.num_steps, max(0, config.length_limit - 1 - request.length))
    noise_of_lanes = torch.zeros(1, dtype=torch.float64)
    first = 0
    previous: Level | None = None
    for depth, size in enumerate(config.level_sizes[:limit]):
        num_lanes = len(found.states.reference.draft_logits[depth][found.index])
        level = Level(depth, slice(first, first + size), num_lanes)
        chosen = _compare_lanes(found, level, previous)
        _compare_confidence(found, level)
        logits = Logits(*(pool.draft_logits[depth][found.index] for pool in found.states[:2]))
        noise_of_lanes = noise_of_lanes[chosen]
        noise = _compare_children(request, found, level, logits)
        noise_of_lanes = (noise_of_lanes + noise).repeat_interleave(size // num_lanes)
        values = found.field("scores").map(lambda own, at=level: log_scores(own[at.entries], config.score))
        request.check.within(SCORES, values.exact, values.fast, float(noise_of_lanes.max()))
        previous = level
        first += size
    _compare_alive(found, limit)


def _explicit(tree: VerifyInput) -> ExplicitCandidates:
    if not isinstance(tree.candidates, ExplicitCandidates):
        raise Mismatch("candidates (type)", "ExplicitCandidates", type(tree.candidates).__name__)
    return tree.candidates


def _compare_lanes(found: Found, level: Level, previous: Level | None) -> torch.Tensor:
    """Compare the parents of a level, and return their places among the entries of the level before."""
    parents = level.rows(found.field("parents"))
    if previous is None:
        found.check.same(PARENTS, parents.reference, parents.fast)
        return torch.zeros(1, dtype=torch.int64)
    if found.config.is_sampled:
        best = torch.arange(level.num_lanes)
    else:
        scores = found.field("scores").fast[previous.entries]
        best = torch.sort(scores, descending=True, stable=True).indices[: level.num_lanes]
    expected = (previous.entries.start + best)[:, None].expand_as(parents.fast)
    found.check.same(PARENTS, expected, parents.fast)
    found.check.decided(parents.map(lambda own: own[:, 0].tolist()))
    return best


def _compare_confidence(found: Found, level: Level) -> None:
    confidence = found.field("confidence")
    if confidence.reference is not None:
        values = confidence.map(lambda own: present("confidence", own)[level.depth : level.depth + 1])
        found.check.close("candidates.confidence", values)


def _compare_children(
    request: ComparedRequest[VerifyInput], found: Found, level: Level, logits: Logits
) -> torch.Tensor | float:
    """Compare every lane's drafts, best ones or drawn ones; returns the error of their log probabilities."""
    config = request.config
    tokens = level.rows(found.field("tokens"))
    if not config.is_sampled:
        compare_drafts(found, TOKENS, tokens, logits)
        _require_falling(found, level)
        return log_prob_budget(*logits, request.check.eps)
    noise = []
    draft_prob = request.field("draft_prob")
    for lane in range(level.num_lanes):
        node = 1 + (level.depth - 1) * config.topk + lane if level.depth else 0
        row = DrawnRow(
            name=TOKENS,
            tokens=tokens.map(lambda own, i=lane: own[i]),
            draft_prob=draft_prob.map(lambda prob_MV, at=node: None if prob_MV is None else prob_MV[at]),
            logits=Logits(*(each[lane, None] for each in logits)),
            root_len=request.length,
            depth=level.depth,
            lanes=range(lane, lane + 1) if level.depth else range(config.topk),
        )
        compare_draws(request, row)
        noise.append(row.logits.log_noise(request))
    return torch.tensor(noise, dtype=torch.float64)


def _require_falling(found: Found, level: Level) -> None:
    """Require that an implementation's scores do not rise from parent to child, nor from sibling to sibling."""
    scores = found.field("scores").fast
    own = level.rows(found.field("scores")).fast
    parents = level.rows(found.field("parents")).fast[:, 0]
    root = 1.0 if found.config.score == "prob" else 0.0
    above = torch.where(parents < 0, root, scores[parents.clamp(min=0)])
    rising = (torch.cat([above[:, None], own], 1).diff(dim=1) > 0).flatten()
    if rising.any():
        place = int(rising.nonzero()[0])
        raise Mismatch(SCORES, "at most its parent's and its elder siblings'", float(own.flatten()[place]), place)


def _compare_alive(found: Found, limit: int) -> None:
    """Require the number of candidates that follows from the implementation's own confidences."""
    drafter = found.step.implementations.reference.engine.drafter
    block: BlockConfig = drafter.block
    depth = limit
    confidence = found.field("confidence")
    if block.cuts:
        is_high = torch.sigmoid(present("confidence", confidence.fast).double()) >= block.threshold
        depth = min(depth, int(is_high.long().cumprod(0).sum()))
    alive = found.field("num_alive").map(int)
    found.check.require("candidates.num_alive", alive.fast == sum(found.config.level_sizes[:depth]), depth, alive.fast)
    found.check.tally.coverage["drafts"] += alive.fast
    found.check.tally.coverage["rounds without drafts"] += alive.fast == 0
    found.check.tally.coverage["blocks cut"] += depth < limit
    found.check.decided(alive)
