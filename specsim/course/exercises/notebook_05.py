"""Exercises of notebook 05: tree attention and masks."""

from specsim.course.exercise import solves

TREES = ([-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 2], [-1, 0, 0, 0, 0], [-1], [-1, 0, 0, 2, 3, 4, 1, 5])


# The parent's word holds the whole path down to it, so one more bit is enough. No walk up the tree is needed.
# - `words[parent] if` → `1 << parent if`: Only the parent and the node itself are visible. From depth 2 on, the older
#   ancestors are missing: take the parent's whole row.
# - `return words` → `return [word & ~(1 << node) for node, word in enumerate(words)]`: A row must see itself too: its
#   own key holds its own token.
# - `[(1 << node + 1) - 1 for node in range(len(parents))]`: That is the causal mask of a sequence. In a tree a node
#   must not see nodes of other branches.
# - `return words` → `return [int(f"{word:0{len(parents)}b}"[::-1], 2) for word in words]`: The bits are in the opposite
#   order: node 0 is bit 0, the one with the value 1.
@solves("05-1", *((tree,) for tree in TREES))
def ancestor_bits(parents: list[int]) -> list[int]:
    """Make the mask's rows as words: bit c of row n is 1 where node n sees node c.

    parents: parent of every node, -1 for the root. A parent comes before its children.
    """
    words: list[int] = []
    for node, parent in enumerate(parents):
        seen = words[parent] if parent >= 0 else 0
        words.append(seen | 1 << node)
    return words


# The root has position L, and a child comes one position after its parent.
# - `[seq_len + node for node in range(len(parents))]`: That is the column of a node. Siblings are alternatives for the
#   same place in the text, so they have the same position.
# - `else seq_len` → `else seq_len + 1`: One too high: L committed tokens have the positions 0 to L - 1, so the root has
#   position L.
# - `else seq_len` → `else seq_len - 1`: One too low: the root is not among the L committed tokens. They end at position
#   L - 1, and the root is next.
# - `positions[parent] + 1` → `seq_len + parent + 1`: That adds 1 to the parent's number. A node comes one place after
#   its parent's position.
@solves("05-2", *zip(TREES, (9, 4, 0, 7, 12), strict=True))
def tree_positions(parents: list[int], seq_len: int) -> list[int]:
    """Compute the position of every node; seq_len: L, number of committed tokens, which have positions 0 to L - 1."""
    positions: list[int] = []
    for parent in parents:
        positions.append(positions[parent] + 1 if parent >= 0 else seq_len)
    return positions


# Bit c of word w is node 32·w + c, which is in column L + 32·w + c. The prefix needs no bits.
# - `*range(seq_len), *(` → `*(`: The committed columns 0 to L - 1 are missing: every row sees the whole prefix.
# - `visible_columns(words, 0)`: Numbers of nodes are no columns: node c is in column L + c. The columns before it hold
#   the prefix, and all of them are visible.
# - `>> bit` → `>> (31 - bit)`: The bits are read from the wrong end: node 0 is bit 0, the one with the value 1.
# - `for bit in range(32) if word >> bit & 1` → `for bit, digit in enumerate(bin(word)[:1:-1]) if digit == "1"`: For a
#   negative word `bin` prints a sign and the digits of its size, which are other bits. Shift the word and test one bit.
# - `32 * index + bit for` → `bit for`, `for node in nodes` → `for node in sorted({*nodes})`: All words are read as the
#   first 32 nodes. Bit c of word w is node 32 · w + c.
@solves("05-3", ([0b1011], 3), ([1], 0), ([-(2**31) + 1, 0b10], 2), ([0b10001, 0, 0b101], 5))
def visible_columns(words: list[int], seq_len: int) -> list[int]:
    """List the columns that a row sees, in ascending order.

    words: the row's mask in words of 32 bits, for a tree of more than 32 nodes several. seq_len: L.
    """
    nodes = [32 * index + bit for index, word in enumerate(words) for bit in range(32) if word >> bit & 1]
    return [*range(seq_len), *(seq_len + node for node in nodes)]
