"""All faults, grouped by operation."""

from specsim.correctness.faults.catalogue import (
    blocks,
    draft_models,
    drafting,
    mtp,
    ranks,
    serving,
    slots,
    targets,
    verification,
)
from specsim.correctness.faults.fault import Fault

GROUPS = (drafting, draft_models, blocks, mtp, slots, verification, targets, ranks, serving)
FAULTS: tuple[Fault, ...] = tuple(fault for group in GROUPS for fault in group.FAULTS)
