"""The round in Triton kernels and CUDA graphs, or in Triton's interpreter without a GPU."""

from specsim.fast.runtime import launch  # before any module of this package imports Triton itself

__all__ = ["launch"]
