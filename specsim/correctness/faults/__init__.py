"""The fault catalogue: defects that speculative decoding has had, injected by name, and the checks that find them."""

from specsim.correctness.faults.campaign import Catalogue, exhibit
from specsim.correctness.faults.fault import Fault, Finding, Trial
from specsim.correctness.faults.injection import Edit, StaleFault

__all__ = ["Catalogue", "Edit", "Fault", "Finding", "StaleFault", "Trial", "exhibit"]
