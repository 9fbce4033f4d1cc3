"""The draft phase: everything the drafter considered, level by level, and the tree that was chosen from it."""

from dataclasses import dataclass

import torch

from specsim.core.phases import Candidates, DraftInput, VerifyInput
from specsim.correctness.differential.budget import log_prob_budget
from specsim.correctness.differential.comparison import Comparison, Trio, present
from specsim.correctness.differential.divergence import Mismatch
from specsim.correctness.differential.draft_input import first_draft_logits
from specsim.correctness.differential.ranking import best, compare_drafts, log_scores
from specsim.correctness.differential.sampled import compare_lanes
from specsim.correctness.differential.scene import Scene

TOKENS = "candidates.tokens"
SCORES = "candidates.scores"
PARENTS = "candidates.parent_list"


@dataclass(frozen=True, slots=True)
class Considered:
    """One request's candidates in every column: tokens, scores [K+(S-1)K²] and parent_list.

    Level 0 are the K children of the root, level i the K² children of the K lanes that were chosen from level i-1.
    """

    tokens: Trio[torch.Tensor]
    scores: Trio[torch.Tensor]
    parents: Trio[torch.Tensor]
    topk: int

    def level(self, index: int) -> slice:
        k = self.topk
        return slice(k + (index - 1) * k * k, k + index * k * k) if index else slice(0, k)

    def lanes(self, index: int) -> Trio[torch.Tensor]:
        """Flat indices of the parents of level `index` ≥ 1, best first."""
        return self.parents.map(lambda parents: parents[1 + (index - 1) * self.topk :][: self.topk])


def compare_candidates(
    scene: Scene, request: int, entered: Trio[DraftInput], trees: Trio[VerifyInput], check: Comparison
) -> None:
    """In the order of cause and effect, so that the first choice that rounding decided ends the comparison.

    The drafts of a lane are ranked by logits, which only the reference shows. Lanes are ranked by scores, which every
    column shows: they are held to exact's within the budget, and the choice to the column's own scores exactly.
    """
    if scene.config.is_sampled and not scene.config.is_plain:
        logits = first_draft_logits(scene, request, entered)
        compare_lanes(scene, request, logits, entered, trees, check)
        return
    pools = trees.map(lambda tree: present("candidates", tree.candidates))
    tokens, scores, parents = (
        pools.map(lambda pool, n=name: getattr(pool, n)[request]) for name in ("tokens", "scores", "parent_list")
    )
    found = Considered(tokens, scores, parents, scene.config.topk)
    check.same(PARENTS, found.parents.reference[: 1 + found.topk], found.parents.fast[: 1 + found.topk])
    check.same(TOKENS, found.tokens.reference[: found.topk], found.tokens.fast[: found.topk])
    if scene.config.is_plain:
        return
    noise = log_prob_budget(*first_draft_logits(scene, request, entered), check.eps)
    _compare_scores(scene, found, 0, noise, check)
    for step in range(1, scene.config.num_steps):
        if step > 1:
            _compare_lanes(found, step, check)
        logits = (pools.reference.draft_logits[step - 1][request], pools.exact.draft_logits[step - 1][request])
        _compare_children(scene, request, found, step, logits, check)
        noise += log_prob_budget(*logits, check.eps)
        _compare_scores(scene, found, step, noise, check)


def _compare_lanes(found: Considered, step: int, check: Comparison) -> None:
    level = found.level(step - 1)
    lanes = found.lanes(step)
    own = level.start + best(found.scores.fast[level], found.topk)
    check.same(PARENTS, own, lanes.fast)
    exact_scores = found.scores.exact[level]
    check.tally.exercised["ties"] += _ties_at_an_edge(exact_scores, found.topk)
    check.decided(torch.equal(lanes.fast, lanes.exact) and torch.equal(lanes.reference, lanes.exact))


def _compare_children(
    scene: Scene,
    request: int,
    found: Considered,
    step: int,
    logits: tuple[torch.Tensor, torch.Tensor],
    check: Comparison,
) -> None:
    """A lane at or beyond max_len was dropped: it proposes ids 0..K-1 with probability 0, and nothing is ranked."""
    k = found.topk
    tokens = found.tokens.map(lambda tokens: tokens[found.level(step)].view(k, k))
    if scene.place(request)[1] + step - 1 >= scene.config.length_limit:
        check.same(TOKENS, tokens.reference, tokens.fast)
    else:
        compare_drafts(check, TOKENS, tokens, *logits, scene.draft_ids)


def _compare_scores(scene: Scene, found: Considered, index: int, noise: float, check: Comparison) -> None:
    """Within the noise as logarithms; and in the column's own figures never above the parent's, best sibling first.

    noise: that of the logarithms of a path's probabilities, together.
    """
    level = found.level(index)
    k = found.topk
    own = found.scores.fast[level].view(-1, min(k, found.scores.fast[level].numel()) or 1)
    above = found.scores.fast[found.lanes(index).fast] if index else own.new_full((1,), _root_score(scene))
    rising = (own > above[:, None]).flatten() if own.numel() else own.new_zeros(0, dtype=torch.bool)
    rising |= torch.nn.functional.pad(own.diff(dim=1) > 0, (1, 0)).flatten()[: len(rising)]
    if rising.any():
        place = int(rising.nonzero()[0])
        expected = found.scores.exact[level][place].item()
        raise Mismatch(SCORES, expected, own.flatten()[place].item(), level.start + place)
    scores = found.scores.map(lambda scores: log_scores(scores[level], scene.config.score))
    check.within(SCORES, scores.exact, scores.fast, noise)


def _root_score(scene: Scene) -> float:
    return 1.0 if scene.config.score == "prob" else 0.0


def _ties_at_an_edge(scores: torch.Tensor, count: int) -> bool:
    """Whether equal scores had to be put in order among the `count` best or at their end."""
    ordered = scores.sort(descending=True).values[: count + 1]
    return bool((ordered[1:] == ordered[:-1]).any())


def compare_tree(scene: Scene, request: int, trees: Trio[VerifyInput], check: Comparison) -> None:
    """The tree that follows from the column's own candidates, to the bit: no rounding is involved any more."""
    from specsim.reference.tree import build
    from specsim.reference.tree_parents import MalformedTree

    reference = trees.reference
    fast = trees.fast
    (row, length) = scene.place(request)
    num_nodes = scene.config.num_draft_tokens
    one = slice(request, request + 1)
    candidates = Candidates(*(getattr(fast.candidates, name)[one] for name in ("tokens", "scores", "parent_list")))
    slots = scene.pools.reference.slots(row, length + torch.arange(num_nodes))
    try:
        expected = build(candidates, reference.draft_tokens[one, 0], torch.tensor([length]), slots[None], scene.config)
    except MalformedTree as error:
        raise Mismatch(PARENTS, "a tree", str(error)) from None
    flattened = {"positions", "cache_locations"}
    for name, ours in expected.tensors.items():
        theirs = getattr(fast, name)
        theirs = (theirs.view(-1, num_nodes) if name in flattened else theirs)[request]
        ours = ours + request * num_nodes if name == "retrieve_index" else ours
        check.same(name, ours.view_as(theirs), theirs)


def compare_selection(scene: Scene, request: int, trees: Trio[VerifyInput], check: Comparison) -> None:
    """Whether all columns chose the same tree; each did right by its own scores."""
    exact = present("candidates", trees.exact.candidates).scores[request]
    check.tally.exercised["ties"] += _ties_at_an_edge(exact, scene.config.num_draft_tokens - 1)
    shapes = trees.map(lambda tree: torch.stack([tree.draft_tokens[request], tree.parents[request]]))
    check.decided(torch.equal(shapes.fast, shapes.exact) and torch.equal(shapes.reference, shapes.exact))
