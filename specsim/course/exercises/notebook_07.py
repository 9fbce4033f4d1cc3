"""Exercises of notebook 07: the KV of a round."""

from specsim.course.exercise import solves

TREE_OF_8 = ["prefix 0", "prefix 1", *(f"node {node}" for node in range(8))]


# A lane needs room for L mod P copied tokens and S steps, rounded up to pages. All lanes have the same offset within a
# page, so the distance between them is this number of columns.
# - `num_pages * page_size` → `num_steps`: That is the layout for pages of one slot. With larger pages two lanes would
#   share a page, and a page belongs to one lane.
# - `(tail + num_steps)` → `num_steps`: The pages of a lane hold the copy of the prefix's unfinished page too. Round up
#   the tail and the steps together.
# - `-(-(tail + num_steps) // page_size)` → `(tail + num_steps) // page_size + 1`: That is one page too many where tail
#   and steps fill their pages exactly. Round up instead: for n columns, -(-n // page_size) pages.
# - `num_pages * page_size` → `page_size`: That gives every lane one page. If the copied tail and the steps do not fit
#   into it, the next lane begins later.
# - `+ step` → `+ step - (tail if lane else 0)`: These lanes write their drafts over the copy of the prefix's tail. The
#   copy comes first, on the lane's first page.
@solves("07-1", (7, 0, 0, 5, 4), (7, 1, 0, 5, 4), (14, 2, 1, 3, 4), (8, 1, 0, 4, 4), (3, 1, 1, 2, 16), (20, 3, 1, 3, 1))
def lane_column(length: int, lane: int, step: int, num_steps: int, page_size: int) -> int:
    """Compute the column in which a lane writes its KV of a step; lanes and steps count from 0."""
    tail = length % page_size
    num_pages = -(-(tail + num_steps) // page_size)
    return length + lane * num_pages * page_size + step


# The whole path is read before any of it is written. In this order no overlap matters. Moving one by one from the first
# node would work on one thread, since a node only moves to the left; a kernel that moves all in parallel has no such
# order.
# - `content[: length + len(path)]`: Nothing has moved. That is right for a chain, whose path has no gaps. Of a tree,
#   the next round would read rejected nodes.
# - `path_content = [content[length + node] for node in path]` →
#   `for depth in reversed(range(len(path))): content[length + depth] = content[length + path[depth]]`,
#   `content[length : length + len(path)] = path_content` → `pass`: The nodes are moved one by one, from the last. Some
#   are overwritten before they are read. Read the whole path first, then write it.
# - `in path]` → `in path[1:]]`, `len(path)] =` → `len(path) - 1] =`: The root is part of the path: its KV was written
#   in this round too. Here its column holds the first accepted draft.
# - `content[length + node]` → `content[node]`: Node j is not in column j. The columns before `length` hold the prefix,
#   and node j is in column `length` + j.
# - `content[length : length + len(path)] =` → `content[: len(path)] =`: The prefix is overwritten. Its columns stay as
#   they are, and the path follows from column `length` on.
@solves("07-2", (TREE_OF_8, 2, [0, 2, 5, 7]), (TREE_OF_8, 2, [0, 1, 2]), (TREE_OF_8, 2, [0]),
        (TREE_OF_8[1:], 1, [0, 1, 2, 3, 6]))  # fmt: skip
def compact(content: list[str], length: int, path: list[int]) -> list[str]:
    """Move the content of the path's nodes to the columns after the prefix, and return what the next round reads.

    content: what each column of a request holds. path: accepted nodes, root first.
    """
    path_content = [content[length + node] for node in path]
    content[length : length + len(path)] = path_content
    # end answer
    return content[: length + len(path)]


# Entry number, node, column, slot: row b of accept_index begins at b · (S + 1), its nodes at b · N, the node's column
# is L + j, and the table names the slot. The reference does the same in kv.commit.
# - `num_steps + 1` → `num_nodes`: Rows of accept_index are read as if they were as long as a tree. They have num_steps
#   + 1 entries. So the first request reads the others' nodes too, and the others read rows that are not theirs.
# - `node - request * num_nodes` → `node`: Nodes are numbered over the whole batch. Node j of request b has the number b
#   · num_nodes + j, and is in column L + j of this request.
# - `(slots[request][length + node], slots[request][length + depth])` → `(length + node, length + depth)`: Those are
#   columns. KV is stored in slots: look up each column in the request's row of the table.
# - `in row if node >= 0` → `in row`: The entries of −1 are not nodes. They fill up the row of a request that has
#   accepted fewer drafts.
@solves("07-3", ([0, 2, 5, 6, -1, -1], [3, 2], [[*range(16)], [*range(20, 36)]], 6, 2),
        ([0, 1, 3, 4, 6, -1], [1, 1], [[*range(10, 20)], [*range(9, -1, -1)]], 4, 2),
        ([0, 2, 5, -1], [2], [[6, 7, 0, 1, 2, 3, 4, 5, 12, 13]], 8, 3),
        ([0, 2, 5, -1], [0, 4], [[*range(8, 24)], [*range(30, 46)]], 5, 1))  # fmt: skip
def commit_moves(
    accept_index: list[int], seq_lens: list[int], slots: list[list[int]], num_nodes: int, num_steps: int
) -> list[tuple[int, int]]:
    """List (slot before, slot after) for every accepted node, request after request, root first.

    accept_index: flat. seq_lens: L of each request. slots: of each request, the slots of its columns 0, 1, …
    """
    width, moves = num_steps + 1, []
    for request, length in enumerate(seq_lens):
        row = accept_index[request * width : (request + 1) * width]
        path = [node - request * num_nodes for node in row if node >= 0]
        moves += [(slots[request][length + node], slots[request][length + depth]) for depth, node in enumerate(path)]
    return moves
