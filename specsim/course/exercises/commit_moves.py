"""Exercise 07-3: the commit of a batch."""

from specsim.course.exercise import Exercise, Mistake


def commit_moves(
    accept_index: list[int], seq_lens: list[int], slots: list[list[int]], num_nodes: int, num_steps: int
) -> list[tuple[int, int]]:
    """List (slot before, slot after) for every accepted node, request after request, root first.

    accept_index: flat. seq_lens: L of each request. slots: of each request, the slots of its columns 0, 1, …
    """
    # begin answer
    width, moves = num_steps + 1, []
    for request, length in enumerate(seq_lens):
        row = accept_index[request * width : (request + 1) * width]
        path = [node - request * num_nodes for node in row if node >= 0]
        moves += [(slots[request][length + node], slots[request][length + place]) for place, node in enumerate(path)]
    return moves
    # end answer


Moves = list[tuple[int, int]]
Slots = list[list[int]]


def _moves(request: int, path: list[int], seq_lens: list[int], slots: Slots) -> Moves:
    """List the moves of a request's path, whose nodes are numbered within the request."""
    row, length = slots[request], seq_lens[request]
    return [(row[length + node], row[length + place]) for place, node in enumerate(path)]


def _tree_wide_rows(
    accept_index: list[int], seq_lens: list[int], slots: Slots, num_nodes: int, _num_steps: int
) -> Moves:
    moves: Moves = []
    for request, first in enumerate(range(0, num_nodes * len(seq_lens), num_nodes)):
        path = [node - first for node in accept_index[first : first + num_nodes] if node >= 0]
        moves += _moves(request, path, seq_lens, slots)
    return moves


def _numbers_of_the_batch(
    accept_index: list[int], seq_lens: list[int], slots: Slots, _num_nodes: int, num_steps: int
) -> Moves:
    return commit_moves(accept_index, seq_lens, slots, 0, num_steps)


def _columns(accept_index: list[int], seq_lens: list[int], slots: Slots, num_nodes: int, num_steps: int) -> Moves:
    return commit_moves(accept_index, seq_lens, [[*range(len(row))] for row in slots], num_nodes, num_steps)


def _with_padding(accept_index: list[int], seq_lens: list[int], slots: Slots, num_nodes: int, num_steps: int) -> Moves:
    moves: Moves = []
    for request in range(len(seq_lens)):
        row = accept_index[request * (num_steps + 1) : (request + 1) * (num_steps + 1)]
        moves += _moves(request, [node - request * num_nodes for node in row], seq_lens, slots)
    return moves


COMMIT_MOVES = Exercise(
    "07-3",
    "Write `commit_moves`, the commit of a whole batch, as a list of pairs: the slot in which an accepted node is, and "
    "the slot to which it moves. Take the requests in order, and the nodes of a path in order, root first. A node that "
    "stays where it is has a pair, too.\n\n"
    "`accept_index` is flat, as a kernel sees it: `num_steps` + 1 entries for each request. Every tree has `num_nodes` "
    "nodes. `slots[b][c]` is the slot of column c of request b, and `seq_lens[b]` its number of committed tokens.\n\n"
    "Hint: go from the entry to the node of the request, from there to its column, and then to the slot.",
    commit_moves,
    (
        ([0, 2, 5, 6, -1, -1], [3, 2], [[*range(16)], [*range(20, 36)]], 6, 2),
        ([0, 1, 3, 4, 6, -1], [1, 1], [[*range(10, 20)], [*range(9, -1, -1)]], 4, 2),
        ([0, 2, 5, -1], [2], [[6, 7, 0, 1, 2, 3, 4, 5, 12, 13]], 8, 3),
        ([0, 2, 5, -1], [0, 4], [[*range(8, 24)], [*range(30, 46)]], 5, 1),
    ),
    (
        Mistake(
            _tree_wide_rows,
            "Rows of accept_index are read as if they were as long as a tree. They have num_steps + 1 entries. So the "
            "first request reads the others' nodes too, and the others read rows that are not theirs.",
        ),
        Mistake(
            _numbers_of_the_batch,
            "Nodes are numbered over the whole batch. Node j of request b has the number b · num_nodes + j, and is in "
            "column L + j of this request.",
        ),
        Mistake(
            _columns,
            "Those are columns. KV is stored in slots: look up each column in the request's row of the table.",
        ),
        Mistake(
            _with_padding,
            "The entries of −1 are not nodes. They fill up the row of a request that has accepted fewer drafts.",
        ),
    ),
    "Entry number, node, column, slot: row b of accept_index begins at b · (S + 1), its nodes at b · N, the node's "
    "column is L + j, and the table names the slot. The reference does the same in kv.commit.",
)
