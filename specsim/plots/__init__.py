"""Pictures of rounds and of servers. Needs matplotlib."""

from specsim.plots.kv import Slot, kv_move, kv_pages, slots
from specsim.plots.serving import timeline
from specsim.plots.speedup import speedup
from specsim.plots.token_tree import mask, tree

__all__ = ["Slot", "kv_move", "kv_pages", "mask", "slots", "speedup", "timeline", "tree"]
