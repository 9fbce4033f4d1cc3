"""Plans of products, which depend on shapes and fit into a GPU's memory."""

import pytest
import torch

from specsim.fast.model.product_plan import Tiling, choose, tile_arguments
from specsim.fast.model.rows import Rows
from specsim.fast.runtime.launch import INTERPRETED


def test_the_choice_depends_only_on_the_shape():
    """The library takes many rows, small weights and wide types."""
    bf16 = torch.bfloat16
    assert choose(65, 4096, 4096, bf16, False) is None
    assert choose(1, 64, 64, bf16, False) is None
    assert choose(1, 4096, 4096, torch.float32, False) is None
    if not INTERPRETED:
        assert choose(1, 4096, 14336, bf16, False) == choose(16, 4096, 14336, bf16, False) == Tiling(16, 32, 512, 4)
        assert choose(17, 4096, 4096, bf16, False).block_m == 64
        assert choose(16, 128256, 4096, bf16, False).block_m == 16
        assert choose(17, 128256, 4096, bf16, False) is None
    assert {choose(rows, 4096, 4096, bf16, True) for rows in (1, 64, 1000)} == {Tiling(64, 32, 256, 4)}
    assert choose(1, 28672, 4096, torch.float32, True, True) == Tiling(64, 64, 32, 4)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_in_flight_fit_into_a_small_gpus_memory(dtype, is_gated, monkeypatch):
    """All stages but one hold a tile of the rows and one of each weight."""
    memory, tiling, weights = 99 * 2**10, choose(64, 4096, 4096, dtype, True, is_gated), 1 + is_gated
    monkeypatch.setattr("specsim.fast.runtime.launch.INTERPRETED", False)
    monkeypatch.setattr("specsim.fast.runtime.launch._shared_memory", lambda: memory)
    stages = tile_arguments(tiling, Rows(torch.empty(64, 4096, dtype=dtype)), 4096, 4096, weights)["STAGES"]
    entries = (tiling.block_m + weights * tiling.block_n) * tiling.block_k
    assert 2 <= stages <= tiling.stages
    assert (stages - 1) * entries * dtype.itemsize <= memory
