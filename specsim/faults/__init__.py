"""The fault museum: defects that speculative decoding has had, planted by name, and who finds them."""

from specsim.faults.fault import Fault, Finding, Trial
from specsim.faults.planting import Edit, StalePlant
from specsim.faults.run import Museum, exhibit

__all__ = ["Edit", "Fault", "Finding", "Museum", "StalePlant", "Trial", "exhibit"]
