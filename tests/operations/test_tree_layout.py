import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specsim.fast.tree import masks as fast
from specsim.reference.tree import bitpacked_mask, full_mask, links, visibility

GPU_BLOCKS = {fast: 1024}


def masks(*sizes_of_requests: int, num_nodes: int) -> torch.Tensor:
    """Draw trees of random parents."""
    trees = [[-1, *(int(torch.randint(node, ())) for node in range(1, num_nodes))] for _ in sizes_of_requests]
    return torch.stack([visibility(parents) for parents in trees])


@pytest.mark.parametrize("lengths", [[4], [0], [3, 1, 7]])
@pytest.mark.parametrize("num_nodes", [1, 5])
def test_full_mask_is_the_prefix_and_then_the_tree(lengths, num_nodes):
    mask_BNN = masks(*lengths, num_nodes=num_nodes)
    flat = full_mask(mask_BNN, torch.tensor(lengths)).tolist()
    start = 0
    for mask, length in zip(mask_BNN.tolist(), lengths, strict=True):
        for row in mask:
            assert flat[start : start + length + num_nodes] == [True] * length + row
            start += length + num_nodes
    assert start == len(flat) == sum(num_nodes * (length + num_nodes) for length in lengths)


@pytest.mark.parametrize("num_nodes", [1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_bitpacked_mask_holds_column_c_in_bit_c(num_nodes):
    mask_BNN = masks(0, 0, num_nodes=num_nodes)
    mask_BNN[0, -1] = True  # the sign bit where the row fills its word
    packed = bitpacked_mask(mask_BNN)
    bytes_a_word = 1 if num_nodes <= 8 else 2 if num_nodes <= 16 else 4
    assert packed.element_size() == bytes_a_word
    assert packed.shape == ((2, num_nodes) if num_nodes <= 32 else (2, num_nodes, -(-num_nodes // 32)))
    for request, row in ((request, row) for request in range(2) for row in range(num_nodes)):
        raw = packed[request, row].flatten().contiguous().numpy().tobytes()
        bits = int.from_bytes(raw, "little")
        assert [bool(bits >> column & 1) for column in range(8 * len(raw))][:num_nodes] == mask_BNN[
            request, row
        ].tolist()
        assert bits >> num_nodes == 0


def test_full_mask_of_no_request_is_empty():
    none = torch.empty(0, 5, 5, dtype=torch.bool)
    full = full_mask(none, torch.empty(0, dtype=torch.int64))
    assert (full.shape, full.dtype) == ((0,), torch.bool)


@pytest.mark.parametrize(("num_nodes", "shape"), [(5, (0, 5)), (33, (0, 33, 2))])
def test_bitpacked_mask_of_no_request_has_no_rows(num_nodes, shape):
    assert bitpacked_mask(torch.empty(0, num_nodes, num_nodes, dtype=torch.bool)).shape == shape


@pytest.mark.parametrize("lengths", [[4], [0], [3, 1, 300], []])
@pytest.mark.parametrize("num_nodes", [1, 5, 33])
def test_fast_full_mask_is_the_references(lengths, num_nodes, device, gpu_blocks, program_order):
    mask_BNN = masks(*lengths, num_nodes=num_nodes) if lengths else torch.empty(0, num_nodes, num_nodes).bool()
    seq_lens = torch.tensor(lengths, dtype=torch.int64)
    expected = full_mask(mask_BNN, seq_lens)
    assert torch.equal(fast.full_mask(mask_BNN.to(device), seq_lens.to(device)).cpu(), expected)
    out = torch.empty_like(expected, device=device)
    assert fast.full_mask(mask_BNN.to(device), seq_lens.to(device), out=out) is out
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("num_nodes", [1, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65])
def test_fast_bitpacked_mask_is_the_references(num_nodes, device, gpu_blocks, program_order):
    mask_BNN = torch.rand(3, num_nodes, num_nodes) < 0.5
    mask_BNN[0, -1] = True  # the sign bit where the row fills its word
    packed, expected = fast.bitpacked_mask(mask_BNN.to(device)).cpu(), bitpacked_mask(mask_BNN)
    assert packed.dtype == expected.dtype
    assert torch.equal(packed, expected)


@pytest.mark.parametrize("num_nodes", [5, 33])
def test_fast_bitpacked_mask_of_no_request_has_no_rows(num_nodes, device):
    none = torch.empty(0, num_nodes, num_nodes, dtype=torch.bool, device=device)
    assert fast.bitpacked_mask(none).shape == bitpacked_mask(none.cpu()).shape


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
