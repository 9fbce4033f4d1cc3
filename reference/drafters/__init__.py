"""Drafters of the reference implementation."""

from specsim.reference.drafters.kinds import HEADS, TOKEN_DRAFTERS, make

__all__ = ["HEADS", "TOKEN_DRAFTERS", "make"]
