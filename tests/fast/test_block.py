"""Metadata of blocks, whose rows see the committed columns and each other; the last request is padded."""

import pytest
import torch

from specsim.fast.drafters.block import block_input


@pytest.mark.parametrize("max_len", [8, 6])
def test_rows_see_the_prefix_and_the_whole_block(pools, make_batch, max_len, device):
    """A row at or beyond max_len is dropped, and no row sees it."""
    batch = make_batch([1, 0, -1], [4, 1, 0])
    bonus = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    ids_R, forms = block_input(batch, bonus, 3, 9, max_len, pools)
    metadata = forms[False]
    kept = min(3, max_len - 4)
    assert ids_R.tolist() == [2, 9, 9, 1, 9, 9, 0, 9, 9]
    assert metadata.slots.tolist() == [*([24, 25, 26][:kept] + [-1] * (3 - kept)), 11, 12, 13, -1, -1, -1]
    assert metadata.positions.tolist() == [*([4, 5, 6][:kept] + [0] * (3 - kept)), 1, 2, 3, 0, 0, 0]
    assert metadata.prefix_lens.tolist() == [*[4] * kept, *[0] * (3 - kept), 1, 1, 1, 0, 0, 0]
    assert metadata.key_lens.tolist() == [4, 1, 0]
    assert metadata.num_extras.tolist() == [3, 3, 0]
    assert metadata.extra_slots.flatten().tolist() == metadata.slots.tolist()
    assert metadata.visible.flatten().tolist() == [*[2**kept - 1] * kept, *[0] * (3 - kept), 7, 7, 7, 0, 0, 0]
    assert forms[True].visible.flatten().tolist() == [*[1, 3, 7][:kept], *[0] * (3 - kept), 1, 3, 7, 0, 0, 0]
    assert metadata.row_starts.tolist() == [0, 3, 6, 9]
    assert (metadata.max_rows, metadata.has_equal_rows, metadata.is_causal) == (3, True, False)


def test_a_block_of_more_rows_than_a_word_has_bits(make_batch, device):
    from types import SimpleNamespace

    pools = SimpleNamespace(req_to_token=torch.arange(50, device=device)[None])
    batch = make_batch([0], [3])
    bonus = torch.tensor([1], dtype=torch.int32, device=device)
    _, forms = block_input(batch, bonus, 40, 9, 100, pools)
    assert forms[False].visible.tolist() == [[-1, 255]] * 40
    assert forms[False].slots.tolist() == [*range(3, 43)]
    seen = [sum((word % 2**32) << 32 * index for index, word in enumerate(row)) for row in forms[True].visible.tolist()]
    assert seen == [2 ** (row + 1) - 1 for row in range(40)]
