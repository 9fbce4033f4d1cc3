"""Fault catalogue: defects that speculative decoding has had, injected by name, and the checks that detect them."""

from specsim.correctness.faults.campaign import CatalogueResult, run_catalogue
from specsim.correctness.faults.fault import Fault, FaultFinding, StaleFault, Trial

__all__ = ["CatalogueResult", "Fault", "FaultFinding", "StaleFault", "Trial", "run_catalogue"]
