"""The fault catalogue: defects that speculative decoding has had, planted by name, and who finds them."""

from specsim.correctness.faults.campaign import Catalogue, exhibit
from specsim.correctness.faults.fault import Fault, Finding, Trial
from specsim.correctness.faults.injection import Edit, StalePlant

__all__ = ["Catalogue", "Edit", "Fault", "Finding", "StalePlant", "Trial", "exhibit"]
