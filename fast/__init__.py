"""The round in Triton kernels and CUDA graphs; without a GPU the kernels run under Triton's interpreter."""

from specsim.fast.runtime import launch  # before any module of this package imports Triton itself

__all__ = ["launch"]
