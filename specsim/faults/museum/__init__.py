"""The faults, by the operation that each is of."""

from specsim.faults.fault import Fault
from specsim.faults.museum import drafting, serving, slots, trees, verification

FAULTS: tuple[Fault, ...] = (
    *drafting.FAULTS,
    *trees.FAULTS,
    *slots.FAULTS,
    *verification.FAULTS,
    *serving.FAULTS,
)
