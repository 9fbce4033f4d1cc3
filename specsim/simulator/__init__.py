"""Simulator of speculating servers: hardware, model shapes and cost of a round, checked against published tables.

Nothing here needs torch: it only takes and returns figures.
"""

from specsim.simulator.cost import CostModel, Phases
from specsim.simulator.drafter import Drafter, drafter
from specsim.simulator.efficiency import Efficiency
from specsim.simulator.hardware import Hardware, hardware
from specsim.simulator.model import Model, model

__all__ = ["CostModel", "Drafter", "Efficiency", "Hardware", "Model", "Phases", "drafter", "hardware", "model"]
