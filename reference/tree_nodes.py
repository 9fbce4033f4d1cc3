"""Parents of a verify tree's nodes, from the candidates selected for it: of lanes, of sampled lanes, or explicit."""


class MalformedTree(ValueError):
    """A parent list that is no tree, reported with request and node."""


def parents_of(top_scores_index: list[int], parent_list: list[int], k: int, request: int = 0) -> list[int]:
    """Find each node's parent, -1 for the root, where node j ≥ 1 is candidate top_scores_index[j-1].

    Candidate f is in block f // K of siblings. The parent of block 0 is the root; that of block j is candidate
    parent_list[j].
    """
    node_of = {flat: node for node, flat in enumerate(top_scores_index, start=1)}
    if len(node_of) < len(top_scores_index):
        raise MalformedTree(f"request {request}: a candidate is selected twice in {top_scores_index}")
    parents = [-1]
    for node, flat in enumerate(top_scores_index, start=1):
        block = flat // k
        if not 0 <= block < len(parent_list):
            raise MalformedTree(
                f"request {request}, node {node}: candidate {flat} is outside the pool of {len(parent_list) * k}"
            )
        parent = 0 if block == 0 else node_of.get(parent_list[block], -1)
        if not 0 <= parent < node:
            raise MalformedTree(
                f"request {request}, node {node}: parent candidate {parent_list[block]} is not selected before it"
            )
        parents.append(parent)
    return parents


def lane_parents(k: int, num_steps: int) -> list[int]:
    """List the parents of the static tree of sampled drafts.

    Node 1 + (d-1)K + l is at depth d in lane l.
    """
    return [-1, *(max(0, node - k) for node in range(1, 1 + k * num_steps))]


def check_explicit(parents: list[int], request: int) -> None:
    """Raise MalformedTree for a candidate whose parent is neither the root nor an earlier candidate."""
    for index, parent in enumerate(parents):
        if not -1 <= parent < index:
            raise MalformedTree(f"request {request}, candidate {index}: parent {parent} is not an earlier candidate")


def explicit_parents(parents: list[int], chosen: list[int], num_nodes: int) -> list[int]:
    """Find each node's parent, -1 for the root and for dead nodes, where node j ≥ 1 is candidate chosen[j-1].

    parents: of the candidates, index of an earlier candidate, -1 for the root.
    """
    node_of = {-1: 0} | {index: node for node, index in enumerate(chosen, start=1)}
    own = [-1, *(node_of[parents[index]] for index in chosen)]
    return own + [-1] * (num_nodes - len(own))
