from hypothesis import given
from hypothesis import strategies as st

from specsim.reference.tree_links import links


@st.composite
def parent_lists(draw, most: int = 70):
    size = draw(st.integers(1, most))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


@given(parent_lists())
def test_links_walk_every_node_once_from_the_root(parents):
    next_token, next_sibling = links(parents)
    found, stack = [], [(0, -1)]
    while stack:
        node, parent = stack.pop()
        found.append(node)
        assert parents[node] == parent
        if next_sibling[node] >= 0:
            assert next_sibling[node] > node
            stack.append((next_sibling[node], parent))
        if next_token[node] >= 0:
            stack.append((next_token[node], node))
    assert sorted(found) == list(range(len(parents)))


def test_links_order_siblings_by_node_index():
    assert links([-1, 0, 1, 0, 1, 0]) == ([1, 2, -1, -1, -1, -1], [-1, 3, 4, 5, -1, -1])
