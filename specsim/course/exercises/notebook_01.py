"""Exercises of notebook 01: one round."""

from specsim.course.exercise import Exercise, Mistake

# Trees by their parents: ordinary, a chain, a root alone, and two branches.
TREE = [-1, 0, 0, 1, 2, 4]
BRANCHES = [-1, 0, 0, 1]


def visible_nodes(parents: list[int], node: int) -> list[int]:
    """List the nodes that a node attends to, in ascending order; the parent of the root, node 0, is -1."""
    # begin answer
    seen = []
    while node >= 0:
        seen.append(node)
        node = parents[node]
    return sorted(seen)
    # end answer


def _all_before(_parents: list[int], node: int) -> list[int]:
    return list(range(node + 1))


def _not_itself(parents: list[int], node: int) -> list[int]:
    return visible_nodes(parents, parents[node])


def _only_the_parent(parents: list[int], node: int) -> list[int]:
    return [parents[node], node] if node else [0]


VISIBLE_NODES = Exercise(
    "01-1",
    "Write `visible_nodes`: the nodes of the tree that a node attends to, in ascending order. `parents[j]` is the "
    "parent of node j. The root is node 0, and its parent is given as -1.",
    visible_nodes,
    ((TREE, 5), (TREE, 3), ([-1, 0, 1, 2], 3), ([-1], 0)),
    (
        Mistake(
            _all_before,
            "That is the mask of a chain: a node sees every node with a smaller number. In a tree some of them belong "
            "to another branch, and their tokens are not part of the node's text.",
        ),
        Mistake(_not_itself, "The node itself is missing. Its own token is the last one of the text that it ends."),
        Mistake(
            _only_the_parent,
            "That stops at the parent. The text that a node ends begins at the root, so all ancestors belong to it.",
        ),
    ),
    "The walk from the node to the root gives the node's text backwards, and it attends to exactly these tokens.",
)


def tokens_of_round(tokens: list[int], parents: list[int], next_tokens: list[int]) -> list[int]:
    """List the tokens that a round gives, bonus token last.

    next_tokens: the target's next token after every node.
    """
    # begin answer
    node, given = 0, []
    while node is not None:
        given.append(next_tokens[node])
        children = (child for child, parent in enumerate(parents) if parent == node)
        node = next((child for child in children if tokens[child] == given[-1]), None)
    return given
    # end answer


def _no_bonus(tokens: list[int], parents: list[int], next_tokens: list[int]) -> list[int]:
    return tokens_of_round(tokens, parents, next_tokens)[:-1]


def _with_root(tokens: list[int], parents: list[int], next_tokens: list[int]) -> list[int]:
    return [tokens[0], *tokens_of_round(tokens, parents, next_tokens)]


def _first_child_only(tokens: list[int], parents: list[int], next_tokens: list[int]) -> list[int]:
    node, given = 0, [next_tokens[0]]
    while node in parents and tokens[parents.index(node)] == given[-1]:
        node = parents.index(node)
        given.append(next_tokens[node])
    return given


def _any_branch(tokens: list[int], _parents: list[int], next_tokens: list[int]) -> list[int]:
    node, given = 0, [next_tokens[0]]
    while given[-1] in tokens[node + 1 :]:
        node = tokens.index(given[-1], node + 1)
        given.append(next_tokens[node])
    return given


TOKENS_OF_ROUND = Exercise(
    "01-2",
    "Write `tokens_of_round`: the tokens that a round gives at temperature 0, in their order, with the bonus token at "
    "the end. `tokens[j]` is the token of node j, `parents[j]` its parent, and `next_tokens[j]` the target's next "
    "token after node j. Children of a node have different tokens.\n\n"
    "Hint: start at the root. The target's next token belongs to the text in any case. Has a child this token?",
    tokens_of_round,
    (
        ([9, 1, 2, 5, 6, 7], TREE, [2, 0, 6, 0, 7, 3]),
        ([9, 1, 2, 5], BRANCHES, [2, 0, 5, 7]),
        ([9, 1, 2, 5], BRANCHES, [8, 5, 6, 7]),
        ([9], [-1], [4]),
    ),
    (
        Mistake(_no_bonus, "The bonus token is missing: where no child fits, the target's own token ends the round."),
        Mistake(
            _with_root,
            "The root is not one of them. It was the bonus token of the round before, which has counted it already.",
        ),
        Mistake(_first_child_only, "That looks at the first child only. Any child may have the target's token."),
        Mistake(
            _any_branch,
            "That looks for the token in the whole tree. Only a child of the node continues its text.",
        ),
    ),
    "Every node of the walk gives one token, the target's own. So a round gives at least one token, and the text is "
    "the one that the target generates without drafts.",
)

EXERCISES = (VISIBLE_NODES, TOKENS_OF_ROUND)
