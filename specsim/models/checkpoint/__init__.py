"""Targets and drafters from a local folder or the hub, checked tensor by tensor."""

from specsim.models.checkpoint.loading import load_drafter, load_target, local_folder, locate

__all__ = ["load_drafter", "load_target", "local_folder", "locate"]
