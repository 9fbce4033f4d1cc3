"""Drafters of the fast implementation."""

from specsim.fast.drafters.heads import HEADS, check_parallel, make

__all__ = ["HEADS", "check_parallel", "make"]
