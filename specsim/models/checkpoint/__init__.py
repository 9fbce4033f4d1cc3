"""Targets and drafters from a local folder or the hub, checked tensor by tensor."""

from specsim.core.pair import DrafterCheckpoint, Pair, TargetCheckpoint
from specsim.models.checkpoint.loading import (
    load,
    load_drafter,
    load_target,
    locate,
)

__all__ = ["DrafterCheckpoint", "Pair", "TargetCheckpoint", "load", "load_drafter", "load_target", "locate"]
