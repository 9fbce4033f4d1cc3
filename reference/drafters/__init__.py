"""Drafters of the reference implementation."""

from specsim.reference.drafters.make_drafter import make_drafter

__all__ = ["make_drafter"]
