"""Drafters of the fast implementation."""

from specsim.fast.drafters.heads import HEADS, make

__all__ = ["HEADS", "make"]
