"""Programs of kernels as on a GPU."""

import pytest


@pytest.fixture
def gpu_blocks(request, monkeypatch) -> None:
    """Use at least as many programs as on a GPU.

    GPU_BLOCKS of the test file has the most rows of a program, by module. The interpreter would otherwise take all rows
    in one.
    """
    for module, most in request.module.GPU_BLOCKS.items():
        monkeypatch.setattr(module, "block_of", lambda count, on_gpu, others=1, most=most: min(on_gpu, most))
