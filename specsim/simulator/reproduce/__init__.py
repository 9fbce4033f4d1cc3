"""Published tables and their reproductions by the simulator, with every error."""

from specsim.simulator.reproduce.tables import TABLES, reproduction

__all__ = ["TABLES", "reproduction"]
