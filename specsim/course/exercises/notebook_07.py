"""Exercises of notebook 07: the KV of a round."""

from specsim.course.exercise import Exercise, Mistake
from specsim.course.exercises.commit_moves import COMMIT_MOVES


def lane_column(length: int, lane: int, step: int, num_steps: int, page_size: int) -> int:
    """Compute the column in which a lane writes its KV of a step; lanes and steps count from 0."""
    # begin answer
    tail = length % page_size
    num_pages = -(-(tail + num_steps) // page_size)
    return length + lane * num_pages * page_size + step
    # end answer


def _no_pages(length: int, lane: int, step: int, num_steps: int, _page_size: int) -> int:
    return length + lane * num_steps + step


def _no_room_for_tail(length: int, lane: int, step: int, num_steps: int, page_size: int) -> int:
    return length + lane * -(-num_steps // page_size) * page_size + step


def _one_page_too_many(length: int, lane: int, step: int, num_steps: int, page_size: int) -> int:
    return length + lane * ((length % page_size + num_steps) // page_size + 1) * page_size + step


def _one_page(length: int, lane: int, step: int, _num_steps: int, page_size: int) -> int:
    return length + lane * page_size + step


def _over_the_tail(length: int, lane: int, step: int, num_steps: int, page_size: int) -> int:
    column = lane_column(length, lane, step, num_steps, page_size)
    return column - length % page_size if lane else column


LANE_COLUMN = Exercise(
    "07-1",
    "Write `lane_column` for a drafter with several lanes. The prefix has `length` tokens. Lane 0 continues right "
    "after it, on the prefix's last page if that page has room. Every other lane has whole pages of its own, as many "
    "as lane 0 uses from that page on, and no page between two lanes is left out. A lane first has the copy of the "
    "prefix's unfinished page, then its steps.\n\n"
    "Hint: compare with the numbers printed above. How far is it from a step of one lane to the same step of the next?",
    lane_column,
    ((7, 0, 0, 5, 4), (7, 1, 0, 5, 4), (14, 2, 1, 3, 4), (8, 1, 0, 4, 4), (3, 1, 1, 2, 16), (20, 3, 1, 3, 1)),
    (
        Mistake(
            _no_pages,
            "That is the layout for pages of one slot. With larger pages two lanes would share a page, and a page "
            "belongs to one lane.",
        ),
        Mistake(
            _no_room_for_tail,
            "The pages of a lane hold the copy of the prefix's unfinished page too. Round up the tail and the steps "
            "together.",
        ),
        Mistake(
            _one_page_too_many,
            "That is one page too many where tail and steps fill their pages exactly. Round up instead: for n columns, "
            "-(-n // page_size) pages.",
        ),
        Mistake(
            _one_page,
            "That gives every lane one page. If the copied tail and the steps do not fit into it, the next lane "
            "begins later.",
        ),
        Mistake(
            _over_the_tail,
            "These lanes write their drafts over the copy of the prefix's tail. The copy comes first, on the lane's "
            "first page.",
        ),
    ),
    "A lane needs room for L mod P copied tokens and S steps, rounded up to pages. All lanes have the same offset "
    "within a page, so the distance between them is this number of columns.",
)


def compact(content: list[str], length: int, path: list[int]) -> list[str]:
    """Move the content of the path's nodes to the columns after the prefix, and return what the next round reads.

    content: what each column of a request holds. path: accepted nodes, root first.
    """
    # begin answer
    moved = [content[length + node] for node in path]
    content[length : length + len(path)] = moved
    # end answer
    return content[: length + len(path)]


def _not_moved(content: list[str], length: int, path: list[int]) -> list[str]:
    return content[: length + len(path)]


def _from_the_last(content: list[str], length: int, path: list[int]) -> list[str]:
    for depth in reversed(range(len(path))):
        content[length + depth] = content[length + path[depth]]
    return content[: length + len(path)]


def _without_the_root(content: list[str], length: int, path: list[int]) -> list[str]:
    drafts = [content[length + node] for node in path[1:]]
    content[length : length + len(drafts)] = drafts
    return content[: length + len(path)]


def _without_length(content: list[str], length: int, path: list[int]) -> list[str]:
    content[length : length + len(path)] = [content[node] for node in path]
    return content[: length + len(path)]


def _path_alone(content: list[str], length: int, path: list[int]) -> list[str]:
    content[: len(path)] = [content[length + node] for node in path]
    return content[: length + len(path)]


TREE_OF_8 = ["prefix 0", "prefix 1", *(f"node {node}" for node in range(8))]
COMPACT = Exercise(
    "07-2",
    "Write the commit of one request. Before it, columns 0 to `length` − 1 hold the prefix, and column `length` + j "
    "holds node j. Change `content` so that the nodes of `path` stand in the columns right after the prefix, in their "
    "order. What is in later columns afterwards does not matter.\n\n"
    "Hint: node 5 may go to the column where node 2 is now. Is node 2 already safe?",
    compact,
    (
        (TREE_OF_8, 2, [0, 2, 5, 7]),
        (TREE_OF_8, 2, [0, 1, 2]),
        (TREE_OF_8, 2, [0]),
        (TREE_OF_8[1:], 1, [0, 1, 2, 3, 6]),
    ),
    (
        Mistake(
            _not_moved,
            "Nothing has moved. That is right for a chain, whose path has no gaps. Of a tree, the next round would "
            "read rejected nodes.",
        ),
        Mistake(
            _from_the_last,
            "The nodes are moved one by one, from the last. Some are overwritten before they are read. Read the whole "
            "path first, then write it.",
        ),
        Mistake(
            _without_the_root,
            "The root is part of the path: its KV was written in this round too. Here its column holds the first "
            "accepted draft.",
        ),
        Mistake(
            _without_length,
            "Node j is not in column j. The columns before `length` hold the prefix, and node j is in column "
            "`length` + j.",
        ),
        Mistake(
            _path_alone,
            "The prefix is overwritten. Its columns stay as they are, and the path follows from column `length` on.",
        ),
    ),
    "The whole path is read before any of it is written. In this order no overlap matters. Moving one by one from the "
    "first node would work on one thread, since a node only moves to the left; a kernel that moves all in parallel "
    "has no such order.",
)


EXERCISES = (LANE_COLUMN, COMPACT, COMMIT_MOVES)
