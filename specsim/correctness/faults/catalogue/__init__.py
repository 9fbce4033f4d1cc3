"""All faults, grouped by operation."""

from specsim.correctness.faults.catalogue import (
    adaptation,
    blocks,
    draft_models,
    drafting,
    mtp,
    p_eagle,
    ranks,
    serving,
    slots,
    targets,
    trees,
    verification,
)
from specsim.correctness.faults.fault import Fault

GROUPS = (drafting, draft_models, blocks, mtp, p_eagle, trees, slots, verification, targets, ranks, serving, adaptation)
FAULTS: tuple[Fault, ...] = tuple(fault for group in GROUPS for fault in group.FAULTS)
