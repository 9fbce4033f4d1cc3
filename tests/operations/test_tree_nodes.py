import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.core.config import SpecConfig
from specsim.core.phases import Candidates
from specsim.fast.tree import malformed as fast
from specsim.reference.tree import MalformedTree, parents_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


GPU_BLOCKS = {fast: 1024}


MALFORMED = [
    ("parent is not selected", [0, 4], [-1, 0, 1], 2),
    ("parent stands after its child", [2, 0], [-1, 0, 1], 1),
    ("parent is the node itself", [0, 2], [-1, 2, 0], 2),
    ("two nodes are each other's parent", [2, 4], [-1, 4, 2], 1),
    ("parent is below the node", [0, 2, 4], [-1, 4, 2], 2),
    ("only the first block hangs from the root", [0, 1, 2], [-1, -1, 0], 3),
    ("parent is beyond the pool", [0, 3], [-1, 99, 0], 2),
    ("parent is negative", [0, 3], [-1, -7, 0], 2),
    ("candidate is beyond the pool", [0, 6], [-1, 0, 1], 2),
    ("candidate is negative", [-1, 0], [-1, 0, 1], 1),
]


@pytest.mark.parametrize(
    ("chosen", "parent_list", "node"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED]
)
def test_a_malformed_parent_list_names_request_and_node(chosen, parent_list, node):
    with pytest.raises(MalformedTree, match=rf"request 3, node {node}\b"):
        parents_of(chosen, parent_list, 2, request=3)


@given(st.integers(1, 3), st.lists(st.integers(-3, 20), max_size=8), st.lists(st.integers(-3, 20), max_size=8))
def test_any_lists_give_a_tree_or_an_error(k, chosen, parent_list):
    def hangs_from(node: int, flat: int) -> list[int]:
        """List the possible parents: the root, or earlier nodes with the candidate that the list names."""
        if not 0 <= flat < k * len(parent_list):
            return []
        wanted = parent_list[flat // k]
        return [0] if flat < k else [other for other in range(1, node) if chosen[other - 1] == wanted]

    possible = [hangs_from(node, flat) for node, flat in enumerate(chosen, start=1)]
    try:
        parents = parents_of(chosen, parent_list, k)
    except MalformedTree:
        assert len(set(chosen)) < len(chosen) or not all(possible)
    else:
        assert parents[0] == -1
        assert all(parent in allowed for parent, allowed in zip(parents[1:], possible, strict=True))


def fault(chosen: list[int], parent_list: list[int], k: int, request: int) -> tuple[str, int]:
    """Find the reference's error for these lists and its node: 0 if no node is named, -1 without an error."""
    try:
        parents_of(chosen, parent_list, k, request)
    except MalformedTree as error:
        return str(error), int(str(error).split("node ")[1].split(":")[0]) if "node " in str(error) else 0
    return "", -1


def check_faults(chosen: list[list[int]], parent_lists: list[list[int]], k: int, device: str) -> None:
    """Compare the first fault of every request, and the error raised for the first of all, with the reference's."""
    size = len(chosen)
    faults = [fault(*lists, k, request) for request, lists in enumerate(zip(chosen, parent_lists, strict=True))]
    parent_list = torch.tensor(parent_lists, dtype=torch.int64).view(size, -1).to(device)
    none = torch.empty(size, 0, device=device)
    candidates, config = Candidates(none, none, parent_list), SpecConfig(k, 1 if k > 1 else 4, 2 if k > 1 else 5)
    index = torch.tensor(chosen, dtype=torch.int64).view(size, -1).to(device)
    assert fast.malformed(candidates, index, config).tolist() == [node + 1 for _, node in faults]
    texts = [text for text, _ in faults if text]
    if not texts:
        fast.check(candidates, index, config)
        return
    with pytest.raises(fast.MalformedTree) as raised:
        fast.check(candidates, index, config)
    assert str(raised.value) == texts[0]


@pytest.mark.parametrize(
    ("chosen", "parent_list", "node"), [case[1:] for case in MALFORMED], ids=[c[0] for c in MALFORMED]
)
def test_a_malformed_parent_list_is_found_by_the_fast_check(chosen, parent_list, node, device, gpu_blocks):
    fine = [*range(len(chosen))]
    assert fault(chosen, parent_list, 2, 0)[1] == node
    check_faults([fine, chosen, fine], [[-1, 0, 1], parent_list, [-1, 0, 1]], 2, device)


def test_a_candidate_beyond_the_pool_has_no_parent_elsewhere(device):
    check_faults([[0, 4], [0, 1]], [[-1, 1], [0, 1]], 2, device)


@given(st.integers(1, 3), st.integers(0, 8), st.integers(1, 8), st.integers(1, 3), st.data())
@settings(max_examples=60)
def test_any_lists_are_checked_as_the_reference_does(k, num_drafts, num_blocks, size, data):
    def lists(length: int):
        return st.lists(st.integers(-3, 20), min_size=length, max_size=length)

    chosen = [data.draw(lists(num_drafts)) for _ in range(size)]
    parent_lists = [data.draw(lists(num_blocks)) for _ in range(size)]
    check_faults(chosen, parent_lists, k, DEVICE)
