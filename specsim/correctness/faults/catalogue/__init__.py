"""All faults, grouped by operation."""

from specsim.correctness.faults.catalogue import (
    draft_models,
    drafting,
    mtp,
    serving,
    slots,
    targets,
    trees,
    verification,
)
from specsim.correctness.faults.fault import Fault

FAULTS: tuple[Fault, ...] = (
    *drafting.FAULTS,
    *draft_models.FAULTS,
    *mtp.FAULTS,
    *trees.FAULTS,
    *slots.FAULTS,
    *verification.FAULTS,
    *targets.FAULTS,
    *serving.FAULTS,
)
