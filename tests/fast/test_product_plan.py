"""Plans of products, which depend on shapes and fit into a GPU's memory."""

import pytest
import torch

from specsim.fast.model import product_plan
from specsim.fast.model.product_plan import ProductTiling, choose, plan_many_rows, tile_arguments
from specsim.fast.model.rows import HiddenRows
from specsim.fast.runtime.launch import INTERPRETED


@pytest.fixture
def wide(monkeypatch):
    """Say whether the GPU has wide products."""

    def has_wide(answer: bool) -> None:
        choose.cache_clear()
        monkeypatch.setattr(product_plan, "has_warp_roles", lambda: answer)

    yield has_wide
    choose.cache_clear()


def test_wide_products_take_more_rows_than_a_narrow_tile(wide):
    """With batch_invariant they take any number of rows, but no small, odd or wide weight."""
    wide(True)
    bf16 = torch.bfloat16
    plan = plan_many_rows(4096, 14336)
    assert {choose(rows, 4096, 14336, bf16, False) for rows in (17, 64, 128)} == {plan}
    assert {choose(rows, 4096, 14336, bf16, True) for rows in (1, 16, 128, 129, 5000)} == {plan}
    others = [choose(rows, 4096, 14336, bf16, False) for rows in (16, 129)]
    others += [choose(64, *shape, bf16, True) for shape in ((64, 64), (4096, 4100), (4100, 4096))]
    others += [choose(64, 4096, 14336, dtype, True) for dtype in (torch.float16, torch.float32)]
    assert not any(isinstance(other, type(plan)) for other in others)


def test_the_choice_depends_only_on_the_shape(wide):
    """The library takes many rows, small weights and wide types."""
    wide(False)
    bf16 = torch.bfloat16
    assert choose(65, 4096, 4096, bf16, False) is None
    assert choose(1, 64, 64, bf16, False) is None
    assert choose(1, 4096, 4096, torch.float32, False) is None
    if not INTERPRETED:
        assert (
            choose(1, 4096, 14336, bf16, False) == choose(16, 4096, 14336, bf16, False) == ProductTiling(16, 32, 512, 4)
        )
        assert choose(17, 4096, 4096, bf16, False).block_m == 64
        assert choose(16, 128256, 4096, bf16, False).block_m == 16
        assert choose(17, 128256, 4096, bf16, False) is None
    assert {choose(rows, 4096, 4096, bf16, True) for rows in (1, 64, 1000)} == {ProductTiling(64, 32, 256, 4)}
    assert choose(1, 28672, 4096, torch.float32, True, True) == ProductTiling(64, 64, 32, 4)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tiles_in_flight_fit_into_a_small_gpus_memory(dtype, is_gated, wide, monkeypatch):
    """All stages but one hold a tile of the rows and one of each weight."""
    wide(False)
    memory, tiling, weights = 99 * 2**10, choose(64, 4096, 4096, dtype, True, is_gated), 1 + is_gated
    monkeypatch.setattr("specsim.fast.runtime.launch.INTERPRETED", False)
    monkeypatch.setattr("specsim.fast.runtime.launch._shared_memory", lambda: memory)
    stages = tile_arguments(tiling, HiddenRows(torch.empty(64, 4096, dtype=dtype)), 4096, 4096, weights)["STAGES"]
    entries = (tiling.block_m + weights * tiling.block_n) * tiling.block_k
    assert 2 <= stages <= tiling.stages
    assert (stages - 1) * entries * dtype.itemsize <= memory
