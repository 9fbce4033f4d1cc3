"""Drafters of the fast implementation."""

from specsim.fast.drafters.make_drafter import NoDrafter, check_parallel, make_drafter

__all__ = ["NoDrafter", "check_parallel", "make_drafter"]
