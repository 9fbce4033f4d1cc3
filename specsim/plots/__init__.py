"""Pictures of rounds and of servers, by matplotlib."""

from specsim.plots.acceptance_rates import acceptance, acceptance_rates, positions
from specsim.plots.distributions import distributions, rejection
from specsim.plots.divergence import divergence
from specsim.plots.keys_seen import keys_seen
from specsim.plots.kv import Slot, kv_move, kv_pages, slots
from specsim.plots.losses import losses
from specsim.plots.servers import batch, pareto, roofline, speedup
from specsim.plots.serving import timeline
from specsim.plots.states import states
from specsim.plots.token_tree import mask, tree

__all__ = ["Slot", "acceptance", "acceptance_rates", "batch", "distributions", "divergence", "keys_seen"]
__all__ += ["kv_move", "kv_pages", "losses", "mask", "pareto", "positions", "rejection", "roofline"]
__all__ += ["slots", "speedup", "states", "timeline", "tree"]
