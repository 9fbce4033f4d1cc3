"""The draft loop: its lanes, and their expansion in each step."""

from specsim.fast.drafting.expansion import expand, extended
from specsim.fast.drafting.lanes import CandidateBuffers, Lanes, start_lanes

__all__ = ["CandidateBuffers", "Lanes", "expand", "extended", "start_lanes"]
