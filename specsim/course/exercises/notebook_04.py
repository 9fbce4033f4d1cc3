"""Exercises of notebook 04: EAGLE drafting."""

from specsim.course.exercise import solves


# Row p holds token p + 1: L rows with features of the target, then a row for each draft with the head's own state.
# - `position + 1` → `position`, `(drafted)` → `([tokens[-1], *drafted][:-1])`: The tokens are not shifted: row p must
#   have the token of position p + 1, so that the head knows which token was sampled after the features.
# - `("drafter", num_read` → `("drafter" if depth else "target", num_read`: The target has not read the root yet, so it
#   has no features of the root's position. The row of the first draft reads the head's own output.
# - `+ depth` → `+ depth - 1`: The positions of the head's own states are one too low. The output of row p − 1 takes the
#   place of the features of token p: it counts as the state of position p, and stands in row p with token p + 1.
# - `+ depth` → `+ depth + 1`: The positions of the drafts are one too high. The first draft is the token of position L
#   + 1, so it is in row L; no position is left out.
@solves("04-1", ([5, 6, 7, 8], []), ([5, 6, 7, 8], [20, 21]), ([3, 9], [4]), ([3, 9], []))
def head_rows(tokens: list[int], drafted: list[int]) -> list[tuple[str, int, int]]:
    """List the rows that the head reads, as (model, position, token id).

    model: "target" or "drafter", whose hidden state of that position the row has.
    """
    num_read = len(tokens) - 1
    of_target = [("target", position, tokens[position + 1]) for position in range(num_read)]
    of_drafter = [("drafter", num_read + depth, token) for depth, token in enumerate(drafted)]
    return of_target + of_drafter


# A child's score is its parent's score times its own probability. Sorting by (−score, number) breaks ties by the lower
# number, so every chosen candidate has its parent with it.
# - `scores[parent] * prob` → `prob`: Candidates are ranked by their own probability. A likely token after an unlikely
#   one is seldom reached: multiply the probabilities on the path.
# - `(-scores[number], number)` → `(-scores[number], -number)`: Ties go to the higher number, so a certain child is
#   chosen without its parent. Of equal scores the lower number wins.
# - `sorted(ranked[:count])` → `ranked[:count]`: The right candidates, in the order of their scores. Nodes are numbered
#   as the candidates are, so that a parent comes before its children: sort the numbers.
# - `scores[parent] * prob` → `probs[parent] * prob`: The product takes only the parent's own probability. Multiply by
#   the parent's score, which holds the whole path.
@solves("04-2", ([-1, -1, 0, 0, 1, 1], [0.5, 0.25, 0.5, 0.125, 0.75, 0.25], 3),
        ([-1, -1, 0, 1, 2, 3], [0.5, 0.25, 1.0, 1.0, 1.0, 0.5], 2),
        ([-1, -1, 0, 0, 2, 2, 3], [0.25, 0.5, 0.5, 0.5, 0.75, 0.25, 1.0], 4),
        ([-1, 0, 1], [0.5, 0.5, 0.5], 3))  # fmt: skip
def best_drafts(parents: list[int], probs: list[float], count: int) -> list[int]:
    """Choose the candidates that become nodes: the `count` best, as ascending numbers.

    parents: number of each candidate's parent, an earlier candidate, or -1 for the root. probs: the drafter's
    probability of each candidate's token after its parent.
    """
    scores: list[float] = []
    for parent, prob in zip(parents, probs, strict=True):
        scores.append(prob if parent < 0 else scores[parent] * prob)
    ranked = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
    return sorted(ranked[:count])


# Row b of `accept_index` begins at b · (S + 1), and its entry num_accepted_drafts is the last node of the path.
# - `request * width` → `request * num_nodes`: That is the error of sglang#26866: rows of `accept_index` are `width`
#   long, not `num_nodes`. Chains and single requests do not show it.
# - `width + count` → `width + count + 1`: One entry too far. Entry 0 is the root, so the last accepted draft is at
#   `num_accepted_drafts`; `num_accepted_tokens` counts the bonus token too.
# - `predict[node] for node in lasts` → `predict[request * num_nodes + node] for request, node in enumerate(lasts)`: The
#   entries of `accept_index` are global numbers already. Adding the request's first node again reads another request's
#   entry.
# - `accept_index[request * width + count]` → `request * num_nodes + count`: That takes the accepted path to be the
#   first nodes of the tree, which is true for a chain only. In a tree the path is in `accept_index`.
@solves("04-3", ([11, -1, 12, -1, -1, 13, 21, -1, -1, -1, -1, -1], [0, 2, 5, 6, -1, -1], [2, 0], 6, 3),  # 0, 2, 5; 6
        ([31, -1, -1, 32, 41, -1, -1, -1, 51, 52, -1, -1], [0, 3, 4, -1, 8, 9], [1, 0, 1], 4, 2),  # paths 0, 3; 4; 8, 9
        ([61, 62, -1, 71, 72, 73], [0, 1, -1, 3, 4, 5], [1, 2], 3, 3),  # a chain: N = S + 1
        ([81, -1, -1, -1, -1], [0, -1, -1], [0], 5, 3))  # fmt: skip
def bonus_tokens(
    predict: list[int], accept_index: list[int], num_accepted_drafts: list[int], num_nodes: int, width: int
) -> list[int]:
    """Find each request's bonus token, the token after the last node of its accepted path.

    num_nodes: N, nodes of a request in `predict`. width: S + 1, entries of a request in `accept_index`.
    """
    lasts = [accept_index[request * width + count] for request, count in enumerate(num_accepted_drafts)]
    return [predict[node] for node in lasts]
