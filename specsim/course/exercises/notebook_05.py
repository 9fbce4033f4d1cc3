"""Exercises of notebook 05: tree attention and masks."""

from specsim.course.exercise import Exercise, Mistake

TREES = ([-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 2], [-1, 0, 0, 0, 0], [-1], [-1, 0, 0, 2, 3, 4, 1, 5])


def ancestor_bits(parents: list[int]) -> list[int]:
    """Make the mask's rows as words: bit c of row n is 1 where node n sees node c.

    parents: parent of every node, -1 for the root. A parent comes before its children.
    """
    # begin answer
    words: list[int] = []
    for node, parent in enumerate(parents):
        seen = words[parent] if parent >= 0 else 0
        words.append(seen | 1 << node)
    return words
    # end answer


def _parent_only(parents: list[int]) -> list[int]:
    return [1 << node | (1 << parent if parent >= 0 else 0) for node, parent in enumerate(parents)]


def _not_itself(parents: list[int]) -> list[int]:
    return [word & ~(1 << node) for node, word in enumerate(ancestor_bits(parents))]


def _triangle(parents: list[int]) -> list[int]:
    return [(1 << node + 1) - 1 for node in range(len(parents))]


def _mirrored(parents: list[int]) -> list[int]:
    return [int(f"{word:0{len(parents)}b}"[::-1], 2) for word in ancestor_bits(parents)]


ANCESTOR_BITS = Exercise(
    "05-1",
    "Write `ancestor_bits`. It receives the parents of a tree's nodes, -1 for the root. Return one integer for each "
    "node: its row of the mask, as bits. Bit c is 1 where the node sees node c. A node sees its ancestors, the root "
    "among them, and itself.\n\n"
    "Hint: `1 << c` is the word in which only bit c is 1. `a | b` has the bits of both.",
    ancestor_bits,
    tuple((tree,) for tree in TREES),
    (
        Mistake(
            _parent_only,
            "Only the parent and the node itself are visible. From depth 2 on, the older ancestors are missing: take "
            "the parent's whole row.",
        ),
        Mistake(_not_itself, "A row must see itself too: its own key holds its own token."),
        Mistake(
            _triangle,
            "That is the causal mask of a sequence. In a tree a node must not see nodes of other branches.",
        ),
        Mistake(_mirrored, "The bits are in the opposite order: node 0 is bit 0, the one with the value 1."),
    ),
    "The parent's word holds the whole path down to it, so one more bit is enough. No walk up the tree is needed.",
)


def tree_positions(parents: list[int], seq_len: int) -> list[int]:
    """Compute the position of every node; seq_len: L, number of committed tokens, which have positions 0 to L - 1."""
    # begin answer
    positions: list[int] = []
    for parent in parents:
        positions.append(positions[parent] + 1 if parent >= 0 else seq_len)
    return positions
    # end answer


def _by_number(parents: list[int], seq_len: int) -> list[int]:
    return [seq_len + node for node in range(len(parents))]


def _one_late(parents: list[int], seq_len: int) -> list[int]:
    return [position + 1 for position in tree_positions(parents, seq_len)]


def _root_is_committed(parents: list[int], seq_len: int) -> list[int]:
    return [position - 1 for position in tree_positions(parents, seq_len)]


def _after_the_parents_number(parents: list[int], seq_len: int) -> list[int]:
    return [seq_len + parent + 1 for parent in parents]


TREE_POSITIONS = Exercise(
    "05-2",
    "Write `tree_positions`. It receives the parents of a tree's nodes and the number of committed tokens, L. Return "
    "the position of every node: the place that its token has in the text of its own branch.\n\n"
    "Hint: the committed tokens have the positions 0 to L − 1, and the root comes next.",
    tree_positions,
    tuple(zip(TREES, (9, 4, 0, 7, 12), strict=True)),
    (
        Mistake(
            _by_number,
            "That is the column of a node. Siblings are alternatives for the same place in the text, so they have the "
            "same position.",
        ),
        Mistake(
            _one_late,
            "One too high: L committed tokens have the positions 0 to L - 1, so the root has position L.",
        ),
        Mistake(
            _root_is_committed,
            "One too low: the root is not among the L committed tokens. They end at position L - 1, and the root is "
            "next.",
        ),
        Mistake(
            _after_the_parents_number,
            "That adds 1 to the parent's number. A node comes one place after its parent's position.",
        ),
    ),
    "The root has position L, and a child comes one position after its parent.",
)


def visible_columns(words: list[int], seq_len: int) -> list[int]:
    """List the columns that a row sees, in ascending order.

    words: the row's mask in words of 32 bits, for a tree of more than 32 nodes several. seq_len: L.
    """
    # begin answer
    nodes = [32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> bit & 1]
    return [*range(seq_len), *(seq_len + node for node in nodes)]
    # end answer


def _tree_only(words: list[int], seq_len: int) -> list[int]:
    return visible_columns(words, seq_len)[seq_len:]


def _nodes_as_columns(words: list[int], seq_len: int) -> list[int]:
    return visible_columns(words, 0)


def _highest_first(words: list[int], seq_len: int) -> list[int]:
    nodes = [32 * place + bit for place, word in enumerate(words) for bit in range(32) if word >> (31 - bit) & 1]
    return [*range(seq_len), *(seq_len + node for node in nodes)]


def _printed_digits(words: list[int], seq_len: int) -> list[int]:
    digits = [(place, bin(word)[2:][::-1]) for place, word in enumerate(words)]
    nodes = [32 * place + bit for place, row in digits for bit, digit in enumerate(row) if digit == "1"]
    return [*range(seq_len), *(seq_len + node for node in nodes)]


def _same_32_nodes(words: list[int], seq_len: int) -> list[int]:
    nodes = sorted({bit for word in words for bit in range(32) if word >> bit & 1})
    return [*range(seq_len), *(seq_len + node for node in nodes)]


VISIBLE_COLUMNS = Exercise(
    "05-3",
    "Write `visible_columns`, the part of an attention kernel that reads a row of the mask. It receives the row as "
    "words of 32 bits: bit c of the first word is node c, bit c of the second word is node 32 + c, and so on. The mask "
    "is of the tree only. The row also sees all L committed columns, and node c is in column L + c. Return all columns "
    "that the row sees.\n\n"
    "Words are signed: where bit 31 is 1, the number is negative. Hint: `word >> c & 1` is bit c, for negative numbers "
    "too.",
    visible_columns,
    (([0b1011], 3), ([1], 0), ([-(2**31) + 1, 0b10], 2), ([0b10001, 0, 0b101], 5)),
    (
        Mistake(_tree_only, "The committed columns 0 to L - 1 are missing: every row sees the whole prefix."),
        Mistake(
            _nodes_as_columns,
            "Numbers of nodes are no columns: node c is in column L + c. The columns before it hold the prefix, and "
            "all of them are visible.",
        ),
        Mistake(_highest_first, "The bits are read from the wrong end: node 0 is bit 0, the one with the value 1."),
        Mistake(
            _printed_digits,
            "For a negative word `bin` prints a sign and the digits of its size, which are other bits. Shift the word "
            "and test one bit.",
        ),
        Mistake(
            _same_32_nodes,
            "All words are read as the first 32 nodes. Bit c of word w is node 32 · w + c.",
        ),
    ),
    "Bit c of word w is node 32·w + c, which is in column L + 32·w + c. The prefix needs no bits.",
)

EXERCISES = (ANCESTOR_BITS, TREE_POSITIONS, VISIBLE_COLUMNS)
