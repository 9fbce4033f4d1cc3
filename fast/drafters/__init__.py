"""Drafters."""

from specsim.fast.drafters.heads import HEADS, make

__all__ = ["HEADS", "make"]
