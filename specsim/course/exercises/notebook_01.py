"""Exercises of notebook 01: one round."""

from specsim.course.exercise import solves

# Trees by their parents: ordinary, a chain, a root alone, and two branches.
TREE = [-1, 0, 0, 1, 2, 4]
BRANCHES = [-1, 0, 0, 1]


# The walk from the node to the root gives the node's text backwards, and it attends to exactly these tokens.
# - `list(range(node + 1))`: That is the mask of a chain: a node sees every node with a smaller number. In a tree some
#   of them belong to another branch, and their tokens are not part of the node's text.
# - `(seen)` → `(seen[1:])`: The node itself is missing. Its own token is the last one of the text that it ends.
# - `[parents[node], node] if node else [0]`: That stops at the parent. The text that a node ends begins at the root, so
#   all ancestors belong to it.
@solves("01-1", (TREE, 5), (TREE, 3), ([-1, 0, 1, 2], 3), ([-1], 0))
def visible_nodes(parents: list[int], node: int) -> list[int]:
    """List the nodes that a node attends to, in ascending order; the parent of the root, node 0, is -1."""
    seen = []
    while node >= 0:
        seen.append(node)
        node = parents[node]
    return sorted(seen)


# Every node of the walk gives one token, the target's own. So a round gives at least one token, and the text is the one
# that the target generates without drafts.
# - `return output` → `return output[:-1]`: The bonus token is missing: where no child fits, the target's own token ends
#   the round.
# - `return output` → `return [tokens[0], *output]`: The root is not one of them. It was the bonus token of the round
#   before, which has counted it already.
# - `in children if` → `in list(children)[:1] if`: That looks at the first child only. Any child may have the target's
#   token.
# - `parent == node` → `child > node`: That looks for the token in the whole tree. Only a child of the node continues
#   its text.
@solves("01-2", ([9, 1, 2, 5, 6, 7], TREE, [2, 0, 6, 0, 7, 3]), ([9, 1, 2, 5], BRANCHES, [2, 0, 5, 7]),
        ([9, 1, 2, 5], BRANCHES, [8, 5, 6, 7]), ([9], [-1], [4]))  # fmt: skip
def tokens_of_round(tokens: list[int], parents: list[int], next_tokens: list[int]) -> list[int]:
    """List the tokens that a round gives, bonus token last.

    next_tokens: the target's next token after every node.
    """
    node, output = 0, []
    while node is not None:
        output.append(next_tokens[node])
        children = (child for child, parent in enumerate(parents) if parent == node)
        node = next((child for child in children if tokens[child] == output[-1]), None)
    return output
