"""Exercise 15-2: a token drafter's proposals."""

from collections.abc import Callable, Sequence
from typing import Any

from specsim.core.token_drafter import Proposal, TreeLimits
from specsim.course.exercise import Exercise, Mistake


def propose(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    """Propose a chain: the tokens that followed the latest earlier occurrence of the last two tokens.

    tokens: prompt and output so far; the last one is the root. limits: max_depth, max_nodes and topk of the tree.
    """
    # begin answer
    last = list(tokens[-2:])
    starts = [start for start in range(len(tokens) - 2) if list(tokens[start : start + 2]) == last]
    if not starts:
        return Proposal([], [], [])
    drafts = list(tokens[starts[-1] + 2 :])[: min(limits.max_depth, limits.max_nodes)]
    return Proposal(drafts, parents=list(range(-1, len(drafts) - 1)), scores=[1.0] * len(drafts))
    # end answer


def _continued(tokens: Sequence[int], limits: TreeLimits, *, earliest: bool = False, shift: int = 2) -> Proposal:
    """Continue an occurrence of the last two tokens, the latest one unless given."""
    starts = [start for start in range(len(tokens) - 2) if list(tokens[start : start + 2]) == list(tokens[-2:])]
    if not starts:
        return Proposal([], [], [])
    drafts = list(tokens[(starts[0] if earliest else starts[-1]) + shift :])[: min(limits.max_depth, limits.max_nodes)]
    return Proposal(drafts, list(range(-1, len(drafts) - 1)), [1.0] * len(drafts))


def _one_place_off(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    return _continued(tokens, limits, shift=1)


def _earliest(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    return _continued(tokens, limits, earliest=True)


def _no_limit(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    return _continued(tokens, TreeLimits(len(tokens), len(tokens), limits.topk))


def _all_below_root(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    drafts = _continued(tokens, limits).tokens
    return Proposal(drafts, [-1] * len(drafts), [1.0] * len(drafts))


def _finds_itself(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    return Proposal([], [], [])


def _last_token_only(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    starts = [start for start in range(len(tokens) - 1) if tokens[start] == tokens[-1]]
    drafts = list(tokens[starts[-1] + 1 :])[: min(limits.max_depth, limits.max_nodes)] if starts else []
    return Proposal(drafts, list(range(-1, len(drafts) - 1)), [1.0] * len(drafts))


def _no_overlap(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    has_repeated = len(tokens) > 2 and list(tokens[-3:-1]) == list(tokens[-2:])
    return Proposal([], [], []) if has_repeated else _continued(tokens, limits)


def _one_too_late(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    return _continued(tokens, limits, shift=3)


def _own_parent(request_id: int, tokens: Sequence[int], limits: TreeLimits) -> Proposal:
    drafts = _continued(tokens, limits).tokens
    return Proposal(drafts, list(range(len(drafts))), [1.0] * len(drafts))


def proposed(drafter: Callable[..., Any], tokens: list[int], max_depth: int, max_nodes: int) -> dict[str, Any]:
    """Look at the proposal for a text, and the limits of a chain."""
    drafts, parents, scores = drafter(0, tokens, TreeLimits(max_depth, max_nodes, 1))
    return {"drafts": list(drafts), "parents": list(parents), "scores in number": len(scores)}


PROPOSE = Exercise(
    "15-2",
    "Write `propose`, the method of a token drafter. It receives the tokens of a request so far. Find the latest "
    "earlier place that has the same two tokens as the end of the text, and propose the tokens that followed it there, "
    "as a chain. Without such a place, return an empty proposal: `Proposal([], [], [])`.\n\n"
    "`Proposal(tokens, parents, scores)` lists the drafts below the root. A parent is the index of an earlier draft, "
    "or −1 for the root. Give every draft the score 1. Propose at most `limits.max_depth` drafts, and at most "
    "`limits.max_nodes`.\n\n"
    "Hint: the last two tokens of the text are not an earlier place.",
    propose,
    (
        ([1, 2, 3, 9, 1, 2], 8, 8),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, 8),
        ([1, 2, 3, 9, 8, 7, 1, 2], 8, 3),
        ([1, 2, 3, 5, 2, 6, 1, 2], 8, 8),
        ([4, 1, 2, 3, 9, 4, 1, 2], 2, 8),
        ([5, 5, 5], 4, 4),
        ([1, 2, 3], 4, 4),
        ([7], 4, 4),
    ),
    (
        Mistake(
            _one_place_off,
            "The first draft is the root itself. The last two tokens are already in the text: begin with the token "
            "after them.",
        ),
        Mistake(
            _earliest,
            "That is the first occurrence. The latest one is nearer to the end of the text, and more often right.",
        ),
        Mistake(
            _no_limit,
            "The chain is longer than the setting allows: the engine refuses such a proposal.",
        ),
        Mistake(
            _all_below_root,
            "All drafts hang below the root, so they are alternatives to each other. In a chain, the parent of a draft "
            "is the draft before it.",
        ),
        Mistake(
            _finds_itself,
            "Nothing is ever proposed. The end of the text itself is found first, and nothing follows it: the place "
            "must be an earlier one.",
        ),
        Mistake(
            _last_token_only,
            "That looks for the last token alone. Both of the last two tokens must be the same.",
        ),
        Mistake(
            _no_overlap,
            "A place may overlap the end of the text: in 5 5 5, the first two tokens equal the last two, and a 5 "
            "follows.",
        ),
        Mistake(
            _one_too_late,
            "The first token after the place is left out. The chain begins with it.",
        ),
        Mistake(
            _own_parent,
            "Every draft is its own parent. The first draft has the root, −1, as its parent, the next one has draft 0.",
        ),
    ),
    "This is prompt lookup with two tokens. It is worth most where the output repeats parts of the prompt.",
    proposed,
)
