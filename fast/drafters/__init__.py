"""Drafters of the fast implementation."""

from specsim.fast.drafters.make_drafter import check_parallel, make_drafter

__all__ = ["check_parallel", "make_drafter"]
