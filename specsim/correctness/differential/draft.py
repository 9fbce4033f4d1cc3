"""Comparison of the draft phase: the candidates of every level, and the tree selected from them."""

from dataclasses import replace
from typing import TypeVar

import torch

from specsim.core.phases import Candidates, ExplicitCandidates, VerifyInput
from specsim.correctness.differential.block import compare_slots
from specsim.correctness.differential.comparison import Mismatch, Trio, log_prob_budget, present
from specsim.correctness.differential.draft_input import compare_product, draft_logits
from specsim.correctness.differential.kv import compare_kv
from specsim.correctness.differential.ranking import (
    LogitsPair,
    candidates_of,
    compare_drafts,
    compare_lanes,
    lane_logits,
    log_scores,
    require_falling,
)
from specsim.correctness.differential.step import ComparedRequest

C = TypeVar("C", bound=Candidates | ExplicitCandidates)
TOKENS = "candidates.tokens"
SCORES = "candidates.scores"
PARENTS = "candidates.parent_list"


def compare_draft(request: ComparedRequest[VerifyInput], lanes: list[torch.Tensor]) -> bool:
    """Compare a request after the draft phase.

    The tree follows even from candidates that rounding decided. lanes: every request's slots of draft lanes, none where
    the drafter has no KV.
    """
    is_same = _compare_candidates(request)
    _compare_tree(request)
    if not is_same:
        return False
    if lanes:
        drafted = request.step.drafted.map(lambda kv: present("draft KV", kv))
        compare_kv(request.check, "draft", drafted, lanes[request.index], request.step.pools.reference)
    return _compare_selection(request)


def _compare_candidates(request: ComparedRequest[VerifyInput]) -> bool:
    """Compare level by level, so that the first choice that rounding decided ends the comparison.

    The drafts of a lane are ranked by logits, which only the reference shows. Lanes are ranked by scores, which every
    implementation shows. The scores are compared with exact's within the budget; the choice has to follow exactly from
    the implementation's own scores.
    """
    config = request.config
    check = request.check
    if request.states.reference.looked_up is not None:
        looked_up = request.states.map(lambda tree: present("looked_up", tree.looked_up))
        _compare_explicit(request.of(looked_up), "looked_up")
    if request.step.drafter.block_rows:
        return compare_slots(request)
    if isinstance(request.states.reference.candidates, ExplicitCandidates):
        _compare_explicit(candidates_of(request, ExplicitCandidates), "candidates")
        return True
    if config.is_plain:
        return True
    entered = request.of(request.step.entered)
    if request.step.entered.reference.has_all_drafts:
        return compare_product(request, entered)
    first_logits = draft_logits(request, entered.field("hidden"))
    if config.is_sampled:
        return compare_lanes(request, first_logits)
    candidates = candidates_of(request, Candidates)
    parents = candidates.field("parent_list")
    tokens = candidates.field("tokens")
    k = config.topk
    check.same(PARENTS, parents.reference[: 1 + k], parents.fast[: 1 + k])
    check.same(TOKENS, tokens.reference[:k], tokens.fast[:k])
    noise = 0.0
    for step in range(config.num_steps):
        if step > 1 and not _compare_lanes(candidates, step):
            return False
        logits = lane_logits(candidates, step) if step else first_logits
        if step and not _compare_children(candidates, step, logits):
            return False
        noise += log_prob_budget(*logits, check.eps)
        _compare_scores(candidates, step, noise)
    return True


def _compare_explicit(candidates: ComparedRequest[ExplicitCandidates], state: str) -> None:
    """Require the same candidates, bit for bit: they follow from token ids alone."""
    check = candidates.check
    alive = candidates.field("num_alive")
    check.same(f"{state}.num_alive", alive.reference, alive.fast)
    for name in ("tokens", "parents", "scores"):
        values = candidates.field(name).map(lambda entries: entries[: int(alive.reference)])
        check.same(f"{state}.{name}", values.reference, values.fast)
    check.tally.coverage["drafts"] += int(alive.reference)
    check.tally.coverage["rounds without drafts"] += int(alive.reference) == 0


def _level(candidates: ComparedRequest[Candidates], index: int) -> slice:
    """Give the entries of a level.

    Level 0 are the K children of the root, level i the K² children of K lanes of level i-1.
    """
    k = candidates.config.topk
    return slice(k + (index - 1) * k * k, k + index * k * k) if index else slice(0, k)


def _lanes(candidates: ComparedRequest[Candidates], index: int) -> Trio[torch.Tensor]:
    """Give the flat indices of the parents of level `index` ≥ 1, best first."""
    k = candidates.config.topk
    return candidates.field("parent_list").map(lambda parents: parents[1 + (index - 1) * k :][:k])


def _compare_lanes(candidates: ComparedRequest[Candidates], step: int) -> bool:
    level = _level(candidates, step - 1)
    lanes = _lanes(candidates, step)
    scores = candidates.field("scores").map(lambda scores: scores[level])
    best = torch.sort(scores.fast, descending=True, stable=True).indices[: candidates.config.topk]
    candidates.check.same(PARENTS, level.start + best, lanes.fast)
    candidates.check.tally.coverage["ties"] += _ties_at_an_edge(scores.exact, candidates.config.topk)
    return candidates.check.decided(lanes.map(torch.Tensor.tolist))


def _compare_children(candidates: ComparedRequest[Candidates], step: int, logits: LogitsPair) -> bool:
    """Compare the children of every lane; a dropped lane proposes ids 0..K-1 with probability 0."""
    k = candidates.config.topk
    tokens = candidates.field("tokens").map(lambda tokens: tokens[_level(candidates, step)].view(k, k))
    if not candidates.is_dropped(step):
        return compare_drafts(candidates, TOKENS, tokens, logits)
    candidates.check.same(TOKENS, tokens.reference, tokens.fast)
    return True


def _compare_scores(candidates: ComparedRequest[Candidates], index: int, noise: float) -> None:
    """Compare a level's scores as logarithms.

    An implementation's own scores never exceed their parent's, and siblings are in descending order. noise: bound on
    the error of the logarithms of a path's probabilities, together.
    """
    config = candidates.config
    level = _level(candidates, index)
    scores = candidates.field("scores")
    level_scores = scores.fast[level].view(-1, config.topk)
    root_score = 1.0 if config.score == "prob" else 0.0
    above = scores.fast[_lanes(candidates, index).fast] if index else level_scores.new_full((1,), root_score)
    require_falling(SCORES, above, level_scores, level.start)
    logs = scores.map(lambda scores: log_scores(scores[level], config.score))
    candidates.check.within(SCORES, logs.exact, logs.fast, noise)


def _ties_at_an_edge(scores: torch.Tensor, count: int) -> bool:
    """Whether equal scores had to be ordered among the `count` best or at their end."""
    ordered = scores.sort(descending=True).values[: count + 1]
    return bool((ordered[1:] == ordered[:-1]).any())


def _compare_tree(request: ComparedRequest[VerifyInput]) -> None:
    """Require the tree that follows from the implementation's own candidates, bit for bit."""
    from specsim.reference.tree import MalformedTree, build

    fast = request.states.fast
    one = slice(request.index, request.index + 1)
    candidates = _of_requests(present("candidates", fast.candidates), one)
    looked_up = fast.looked_up and _of_requests(fast.looked_up, one)
    slots = request.slots(request.length + torch.arange(request.config.num_draft_tokens))
    root = request.states.reference.draft_tokens[one, 0]
    try:
        steps = request.step.batch.draft_steps[one]
        length = torch.tensor([request.length])
        expected = build(candidates, root, length, slots[None], request.config, steps, looked_up)
    except MalformedTree as error:
        raise Mismatch(PARENTS, "a tree", str(error)) from None
    for name, ours in expected.tensors.items():
        rows = request.nodes if name in ("positions", "cache_locations") else request.index
        theirs = getattr(fast, name)[rows]
        ours = ours + request.nodes.start if name == "retrieve_index" else ours
        request.check.same(name, ours.view_as(theirs), theirs)


def _of_requests(candidates: C, requests: slice) -> C:
    """Take the candidates of some requests."""
    return replace(candidates, **{name: value[requests] for name, value in candidates.tensors.items()})


def _compare_selection(request: ComparedRequest[VerifyInput]) -> bool:
    """Count the selected tree as a choice; each is right by its implementation's own scores."""
    if not request.step.drafter.block_rows:
        if isinstance(request.states.reference.candidates, ExplicitCandidates):
            return True
        exact = candidates_of(request, Candidates).field("scores").exact
        request.check.tally.coverage["ties"] += _ties_at_an_edge(exact, request.config.num_draft_tokens - 1)
    i = request.index
    trees = request.states.map(lambda tree: (tree.draft_tokens[i].tolist(), tree.parents[i].tolist()))
    return request.check.decided(trees)
