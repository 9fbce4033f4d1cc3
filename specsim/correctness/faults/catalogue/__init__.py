"""All faults, grouped by operation."""

from specsim.correctness.faults.catalogue import drafting, serving, slots, trees, verification
from specsim.correctness.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *drafting.FAULTS,
    *trees.FAULTS,
    *slots.FAULTS,
    *verification.FAULTS,
    *serving.FAULTS,
)
