"""The faults, by the operation that each is of."""

from specsim.faults.fault import Fault
from specsim.faults.museum import drafting, slots

FAULTS: tuple[Fault, ...] = (*drafting.FAULTS, *slots.FAULTS)
