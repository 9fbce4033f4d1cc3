"""Targets and drafters from a local folder or the hub, checked tensor by tensor."""

from specsim.models.checkpoint.loading import (
    DrafterCheckpoint,
    Pair,
    TargetCheckpoint,
    load,
    load_drafter,
    load_target,
    locate,
)

__all__ = ["DrafterCheckpoint", "Pair", "TargetCheckpoint", "load", "load_drafter", "load_target", "locate"]
