"""Calibration of the cost model from benchmark files, and profiles that keep the result."""

from specsim.simulator.calibration.observation import Observation
from specsim.simulator.calibration.profile import Profile, profile

__all__ = ["Observation", "Profile", "profile"]
